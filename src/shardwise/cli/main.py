"""The `shardwise` command: finds the verb, hands over, and turns user errors into three lines.

A verb is a module of this package with HELP, add_arguments(parser) and run(args); REPORTS = True gives it `--json`.
Words of the form `section.key=value` may stand anywhere and reach the verb as `args.overrides`. Only the verb that was
named is imported, and no verb imports torch at module level: `--help` must answer at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from shardwise import __version__
from shardwise.errors import Exit, UserError

VERBS = {
    "train": "plan, start the processes and train",
    "resume": "go on from a run's newest checkpoint",
    "init": "write a commented config file",
    "runs": "list the runs of a directory",
    "watch": "follow a run in the terminal",
    "stop": "stop a run cleanly; it can be resumed",
    "compare": "two runs side by side",
    "generate": "sample text from a run or a model directory",
    "eval": "loss and perplexity of a run or a model directory",
    "export": "write a run's weights in another format",
    "convert": "turn weights of one format into another",
    "data": "prepare text into tokens, look inside",
    "doctor": "what this machine is and how fast",
    "explain": "half a page on a technique",
}
OVERRIDE = re.compile(r"^[a-z]\w*\.[a-z]\w*=", re.IGNORECASE)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help", "help"):
            print(overview())
            return Exit.DONE
        if words[0] in ("-V", "--version"):
            print(f"shardwise {__version__}")
            return Exit.DONE
        return _dispatch(words[0], words[1:])
    except UserError as error:
        print(error, file=sys.stderr)
        return error.code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `shardwise runs | head -1`
        sys.stderr.close()
        return Exit.DONE


def _dispatch(name: str, words: list[str]) -> int:
    if name not in VERBS:
        import difflib

        near = difflib.get_close_matches(name, VERBS, n=1)
        raise UserError(
            f"unknown command `{name}`",
            why=f"the commands are {', '.join(VERBS)}",
            fix=f"did you mean `shardwise {near[0]}`?" if near else "`shardwise --help` says what each does",
        )
    verb: Any = import_module(f"shardwise.cli.{name}")
    parser = _Parser(
        prog=f"shardwise {name}", description=verb.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "section.key=value words change the config; `shardwise init` writes a file with all keys."
    verb.add_arguments(parser)
    if getattr(verb, "REPORTS", False):
        parser.add_argument("--json", action="store_true", help="machine-readable report")
    args = parser.parse_args([word for word in words if not OVERRIDE.match(word)])
    args.overrides = [word for word in words if OVERRIDE.match(word)]
    return int(verb.run(args))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(message, why=self.format_usage().strip(), fix=f"`{self.prog} --help` lists every option")


def overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {what}" for name, what in VERBS.items()]
    return "\n".join(
        [
            f"shardwise {__version__}: train language models split over many devices",
            "",
            "usage: shardwise COMMAND [options] [section.key=value ...]",
            "",
            *lines,
            "",
            "start here:  shardwise train        (a small model on this machine, about two minutes)",
            "             shardwise explain      (what each technique does, half a page each)",
        ]
    )
