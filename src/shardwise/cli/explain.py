"""`shardwise explain WORD`: half a page on a technique, in parts that are the same for every word."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from shardwise.errors import Exit, UserError
from shardwise.explain.pages import all_pages, find_page, key_lines, preset_rows, render_index, render_page

HELP = "Half a page on a technique: what it splits, sends and saves. Without a word: the list of words."
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("word", nargs="*", help="for example: zero, pipeline, sum-rule, ring all-reduce")
    parser.add_argument(
        "--demo", action="store_true", help="run it on local processes and count bytes (not available yet)"
    )


def run(args: argparse.Namespace) -> int:
    if not args.word:
        index = {word: page.line for word, page in all_pages().items()}
        print(json.dumps({"schema": 1, "words": index}, indent=2) if args.json else render_index())
        return Exit.DONE
    page = find_page(" ".join(args.word))
    if args.demo:
        raise UserError(
            "`--demo` is not available yet",
            why=f"this version explains `{page.word}` but does not act it out on processes",
            fix=f"shardwise explain {page.word}",
        )
    if args.json:
        report = {"schema": 1, **asdict(page), "config": key_lines(page)}
        if page.lists == "presets":
            report["table"] = "\n".join(preset_rows())
        print(json.dumps(report, indent=2))
    else:
        print(render_page(page))
    return Exit.DONE
