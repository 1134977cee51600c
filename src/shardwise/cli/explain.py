"""`shardwise explain WORD` prints half a page on a technique, in parts that are the same for every word; `--demo` acts
it out."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from shardwise.demo import DEMOS
from shardwise.errors import Exit, UserError
from shardwise.explain.pages import all_pages, find_page, key_lines, preset_rows, render_index, render_page

HELP = "Half a page on a technique: what it splits, sends and saves. Without a word: the list of words."
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", nargs="*", help="for example: zero, pipeline, sum-rule, ring all-reduce")
    parser.add_argument(
        "--demo", action="store_true", help=f"act it out on local processes and count bytes: {', '.join(DEMOS)}"
    )


def run(args: argparse.Namespace) -> int:
    if not args.word:
        if args.demo:
            raise _no_demo("a demo needs a word", "zero")
        index = {word: page.line for word, page in all_pages().items()}
        print(json.dumps({"schema": 1, "words": index}, indent=2) if args.json else render_index())
        return Exit.DONE
    page = find_page(" ".join(args.word))
    if args.demo:
        if page.word not in DEMOS:
            raise _no_demo(f"`--demo` is not available yet for `{page.word}`", page.word)
        from shardwise.demo.perform import perform

        return perform(page.word, args.json)
    if args.json:
        report = {"schema": 1, **asdict(page), "config": key_lines(page), "demo": page.word in DEMOS}
        if page.lists == "presets":
            report["table"] = "\n".join(preset_rows())
        print(json.dumps(report, indent=2))
    else:
        print(render_page(page))
    return Exit.DONE


def _no_demo(what: str, word: str) -> UserError:
    return UserError(
        what,
        why=f"these words have one: {', '.join(DEMOS)}",
        fix=f"shardwise explain {word}, or one of those with --demo",
    )
