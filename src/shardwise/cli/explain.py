"""`shardwise explain WORD` prints half a page on a technique, in parts that are the same for every word; `--demo` acts
it out."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from dataclasses import asdict

from shardwise.demo import DEMOS
from shardwise.errors import Exit, UserError
from shardwise.explain.pages import WIDTH, all_pages, find_page, key_lines, preset_rows, render_index, render_page
from shardwise.terminal import is_live, shows_colour

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
        print(json.dumps({"schema": 1, "words": index}, indent=2) if args.json else render_index(_width()))
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
        print(_in_our_look(render_page(page, _width())))
    return Exit.DONE


def _width() -> int:
    return min(WIDTH, shutil.get_terminal_size().columns) if is_live() else WIDTH


def _in_our_look(text: str) -> str:
    """Returns a page with its word bold and its labels dim where colours are seen: without rich, which takes longer to
    load than a page to print."""
    if not shows_colour():
        return text
    text = re.sub(r"\A\S+:", "\x1b[1m\\g<0>\x1b[0m", text)
    return re.sub(r"^(?=\S).{10}(?=  \S)", "\x1b[2m\\g<0>\x1b[0m", text, flags=re.MULTILINE)


def _no_demo(what: str, word: str) -> UserError:
    return UserError(
        what,
        why=f"these words have one: {', '.join(DEMOS)}",
        fix=f"shardwise explain {word}, or one of those with --demo",
    )
