"""`shardwise data prepare` turns text into token shards; `shardwise data show` looks inside them.

The work is in `shardwise.data`; this file only reads arguments and prints. No torch.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cluster.describe.machine import usable_cores
from shardwise.errors import Exit, UserError
from shardwise.terminal import counted, say, say_error, shell_word

if TYPE_CHECKING:
    from shardwise.data.shards import TokenStore
    from shardwise.data.show import ShownRow
    from shardwise.spec.schema import DataConfig

HELP = "prepare text into tokens, look inside"
CONFIG = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(dest="data_verb", required=True, metavar="prepare|show")
    prepare = verbs.add_parser("prepare", help="text, .jsonl, .parquet or `python` into token shards")
    prepare.add_argument("sources", nargs="+", metavar="SOURCE", help="files, directories, or `python`")
    prepare.add_argument("--tokenizer", help="`bytes`, or a tokenizer.json (or the directory that holds it)")
    prepare.add_argument("--out", required=True, type=Path, metavar="DIR", help="directory to make")
    prepare.add_argument(
        "--validation-fraction", type=float, metavar="F", help="share of documents held out (default 0.01)"
    )
    prepare.add_argument("--text-field", metavar="NAME", help="field of .jsonl and .parquet rows that holds plain text")
    prepare.add_argument("--chat-template", metavar="FILE", help="a Jinja template for conversations")
    prepare.add_argument(
        "--invalid-utf8",
        choices=("refuse", "replace"),
        default="refuse",
        help="what to do with text that is not valid UTF-8",
    )
    prepare.add_argument(
        "--bad-rows",
        choices=("refuse", "quarantine"),
        default="refuse",
        help="what to do with rows that cannot be used; quarantine: leave them out and list them in quarantine.jsonl",
    )
    prepare.add_argument("--workers", type=int, metavar="N", help="cores to use (default: all)")
    prepare.add_argument("--force", action="store_true", help="replace a prepared directory")
    prepare.add_argument("--json", action="store_true", help="machine-readable report")
    show = verbs.add_parser("show", help="what a prepared directory holds")
    show.add_argument("directory", type=Path, metavar="DIR", help="a directory that `data prepare` made")
    show.add_argument("--rendered", action="store_true", help="print training rows with the loss mask made visible")
    show.add_argument("--seq-len", type=int, default=256, metavar="N", help="tokens per row (default 256)")
    show.add_argument("--num", type=int, default=3, metavar="N", help="rows to print (default 3)")
    show.add_argument("--verify", action="store_true", help="check the digest of every file")
    show.add_argument("--json", action="store_true", help="machine-readable report")


def run(args: argparse.Namespace) -> int:
    return _prepare(args) if args.data_verb == "prepare" else _show(args)


def _prepare(args: argparse.Namespace) -> int:
    data = _settings(args)
    if args.workers is not None:
        if args.workers < 1:
            raise UserError(
                f"--workers {args.workers} is too few", why="one core is needed at least", fix="--workers 1"
            )
        # The tokenizers library sizes its own thread pool, once per process, by this variable alone. It starts as many
        # threads as are asked for, and thousands of them keep each other from working.
        if args.workers > (cores := usable_cores()):
            say_error(f"workers  {cores}: there are no more cores for {args.workers}")
        os.environ["RAYON_NUM_THREADS"] = str(min(args.workers, cores))
    from shardwise.data.chat import open_template
    from shardwise.data.prepare import prepare
    from shardwise.data.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(data.tokenizer)
    info = prepare(
        args.sources,
        tokenizer,
        args.out,
        template=open_template(data.chat_template, None, tokenizer),
        validation_fraction=data.validation_fraction,
        text_field=data.text_field,
        replace_invalid=args.invalid_utf8 == "replace",
        bad_rows=args.bad_rows,
        workers=args.workers,
        force=args.force,
        progress=not args.json,
    )
    if args.json:
        print(json.dumps({"schema": 1, "directory": str(info.directory), **_summary(info.index)}))
        return Exit.DONE
    _print_summary(args.out, info.index)
    say(f"next     shardwise train data.source={shell_word(args.out)}")
    say(f"         shardwise data show {shell_word(args.out)} --rendered")
    return Exit.DONE


def _settings(args: argparse.Namespace) -> DataConfig:
    """Returns the [data] section from `data.key=value` words, then from the options."""
    from shardwise.config.load import load_config

    foreign = [word for word in getattr(args, "overrides", []) if not word.startswith("data.")]
    if foreign:
        raise UserError(
            f"`{foreign[0]}` cannot be used with `data prepare`",
            why="it reads only the [data] section",
            fix="leave it out",
        )
    given = {
        "tokenizer": args.tokenizer,
        "validation_fraction": args.validation_fraction,
        "text_field": args.text_field,
        "chat_template": args.chat_template,
    }
    data = load_config(None, getattr(args, "overrides", [])).config.data
    data = replace(data, **{key: value for key, value in given.items() if value is not None})
    if not 0 <= data.validation_fraction <= 0.5:
        raise UserError(
            f"--validation-fraction {data.validation_fraction:g} is out of range",
            why="it is the share of documents held out, from 0 to 0.5",
            fix="--validation-fraction 0.01",
        )
    return data


def _show(args: argparse.Namespace) -> int:
    if args.seq_len < 2 or args.num < 1:
        raise UserError(
            f"--seq-len {args.seq_len} --num {args.num} shows nothing",
            why="a row has at least two tokens, and at least one row is shown",
            fix="--seq-len 256 --num 3",
        )
    from shardwise.data.shards import TokenStore
    from shardwise.data.show import about_row, print_row

    store = TokenStore(args.directory, verify=args.verify)
    rows = _first_rows(store, args.seq_len, args.num) if args.rendered else []
    if args.json:
        report = {"schema": 1, "directory": str(args.directory), **_summary(store.index)}
        print(json.dumps(report | ({"samples": rows} if args.rendered else {})))
        return Exit.DONE
    _print_summary(args.directory, store.index)
    if args.verify:
        say("verified every file has the digest its index names")
    for number, row in enumerate(rows, 1):
        say(f"\nrow {number}: {about_row(row)}")
        print_row(row)
    return Exit.DONE


def _summary(index: dict[str, Any]) -> dict[str, Any]:
    splits = {
        name: {key: split[key] for key in ("tokens", "trained_tokens", "documents")}
        for name, split in index["splits"].items()
    }
    shards = [shard["bytes"] for split in index["splits"].values() for shard in split["shards"]]
    tokenizer = {key: index["tokenizer"][key] for key in ("name", "digest", "vocab_size", "separator")}
    sources = [{key: source[key] for key in ("name", "title", "num_files", "bytes")} for source in index["sources"]]
    return {
        "dtype": index["dtype"],
        "tokenizer": tokenizer,
        "max_token": index["max_token"],
        "documents": index["documents"],
        "text_bytes": index.get("text_bytes", index["bytes"]),  # an older index has the bytes of files only
        "token_bytes": sum(shards),
        "shards": len(shards),
        "chat": index["chat"],
        "chat_template": index["chat_template"],
        "splits": splits,
        "sources": sources,
        "notes": index.get("notes", []),
        "quarantined": index.get("quarantined", 0),
    }


def _print_summary(directory: Path, index: dict[str, Any]) -> None:
    from shardwise.data.corpus import human_bytes

    about = _summary(index)
    for source in about["sources"]:
        say(f"source   {source['name']}: {counted(source['num_files'], 'file')}, {human_bytes(source['bytes'])}")
    for name, split in about["splits"].items():
        trained = "" if split["trained_tokens"] == split["tokens"] else f", {split['trained_tokens']:,} with loss"
        say(
            f"{'train' if name == 'train' else 'held out':<8} {counted(split['documents'], 'document')}, "
            f"{split['tokens']:,} tokens{trained}"
        )
    per_token = about["text_bytes"] / max(1, sum(split["tokens"] for split in about["splits"].values()))
    tokenizer = about["tokenizer"]
    say(
        f"tokens   {tokenizer['name']}, {tokenizer['vocab_size']:,} ids (largest used {about['max_token']:,}), "
        f"{per_token:.2f} bytes of text per token"
    )
    shards = f"{counted(about['shards'], 'shard')} of {about['dtype']}"
    say(f"files    {directory}: {shards}, {human_bytes(about['token_bytes'])}")
    if about["quarantined"]:
        listed = directory / "quarantine.jsonl"
        say(f"left out {counted(about['quarantined'], 'row')} that cannot be used, listed in {listed}")
    for note in about["notes"]:
        say(f"note     {note}")


def _first_rows(store: TokenStore, seq_len: int, num: int) -> list[ShownRow]:
    from shardwise.data.sequences import Layout, Sequences
    from shardwise.data.show import render_rows

    tokenizer = store.tokenizer()
    split = store.train if store.train.num_tokens else store.validation
    length = min(seq_len, max(2, split.num_tokens - 1))
    layout = Layout(split, length, "whole" if store.is_chat else "stream", tokenizer.separator)
    return render_rows(Sequences([layout], seq_len=length, seed=0), tokenizer, num) if layout.count else []
