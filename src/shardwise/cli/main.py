"""This is the `shardwise` command: it finds the verb, hands over, and turns user errors into three lines.

A verb is a module of this package with HELP, add_arguments(parser) and run(args); REPORTS = True gives it `--json`,
CONFIG = True lets it take config words.
Words of the form `section.key=value` may stand anywhere and reach the verb as `args.overrides`. Only the verb that was
named is imported, and no verb imports torch at module level: `--help` must answer at once.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from shardwise import __version__
from shardwise.cli.option_hints import check_options, options_of
from shardwise.errors import Exit, UserError
from shardwise.run.known_warnings import known_warnings_left_out
from shardwise.terminal import prepared, say_error

VERBS = {
    "train": "plan, start the processes and train",
    "resume": "go on from a run's newest checkpoint",
    "plan": "the fastest layouts for a model on a cluster, predicted and explained",
    "verify": "prove that a layout computes what one process computes",
    "rehearse": "run every class of ranks without its machines; match all messages",
    "init": "write a config file: what you name, a recipe, or every key",
    "runs": "list the runs of a directory",
    "watch": "follow a run in the terminal",
    "stop": "stop a run cleanly; it can be resumed",
    "compare": "runs side by side, with a verdict",
    "generate": "sample text from a run or a model directory",
    "eval": "loss and perplexity of a run or a model directory",
    "export": "write a run's weights in another format",
    "convert": "turn weights of one format into another",
    "data": "prepare text into tokens, look inside",
    "launch": "jobs of several nodes: SLURM, Kubernetes, Ray, ssh",
    "doctor": "what this machine is and how fast",
    "bench": "measure layers, collectives or whole steps here",
    "explain": "half a page on a technique",
    "completion": "make bash, zsh or fish complete commands, keys, presets and runs",
}
OVERRIDE = re.compile(r"^[a-z]\w*\.[a-z]\w*=", re.IGNORECASE)
SETTING = re.compile(r"^[a-z]\w*(\.[a-z]\w*)*=", re.IGNORECASE)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    with prepared(plain="--plain" in words), known_warnings_left_out():
        return _exit_code(words[1:] if words[:1] == ["--plain"] else words)


def _exit_code(words: list[str]) -> int:
    """Runs a command line and returns its exit code; whatever goes wrong is said here."""
    try:
        with _sigterm_unwinds():
            code = _run(words)
            sys.stdout.flush()  # here, where a reader that has gone is no error
            return code
    except UserError as error:
        say_error(str(error))
        return error.code
    except _Terminated:
        return Exit.STOPPED
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `shardwise runs | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is still buffered goes nowhere at exit
        return Exit.DONE
    except OSError as error:  # a file that no verb thought of
        from shardwise.files import refused

        say_error(str(refused(error)))
        return Exit.USER_MISTAKE
    except Exception as error:
        say_error(str(_bug(error)))
        return Exit.BUG


def _run(words: list[str]) -> int:
    if words[:1] == ["help"] and len(words) > 1:
        return _dispatch(words[1], ["--help"])
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
        return Exit.DONE
    if words[0] in ("-V", "--version"):
        print(f"shardwise {__version__}")
        return Exit.DONE
    return _dispatch(words[0], words[1:])


class _Terminated(BaseException):
    """Is raised for SIGTERM, so that it unwinds the stack: scratch directories are removed, locks given back."""


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Lets a scheduler's SIGTERM end any verb like Ctrl-C does. Training has handlers of its own, which finish the
    step."""

    def unwind(number: int, frame: object) -> None:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _bug(error: Exception) -> UserError:
    """Returns the three lines to show for a bug of ours, and writes the traceback to a file."""
    import tempfile
    import traceback

    first = next(iter(str(error).splitlines()), "")
    text = "".join(traceback.format_exception(error))
    try:
        handle, file = tempfile.mkstemp(prefix="shardwise-crash-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
    except OSError:
        file = text  # better in the terminal than nowhere
    return UserError(
        f"{type(error).__name__}: {first}",
        why=f"this is a bug of shardwise; the details are in {file}",
        fix="please report it with that file",
        code=Exit.BUG,
    )


def _dispatch(name: str, words: list[str]) -> int:
    if name not in VERBS:
        import difflib

        near = difflib.get_close_matches(name.lower(), [*VERBS, "--version", "--help"], n=1)
        fix = f"did you mean `shardwise {near[0]}`?" if near else "`shardwise --help` says what each does"
        if OVERRIDE.match(name):
            fix = f"a key comes after the command: `shardwise train {name}`"
        elif name == "shardwise":
            fix = f"once is enough: `{' '.join(['shardwise', *words])}`"
        raise UserError(f"unknown command `{name}`", why=f"the commands are {', '.join(VERBS)}", fix=fix)
    verb: Any = import_module(f"shardwise.cli.{name}")
    parser = parser_of(name)
    overrides = _overrides(parser, words, getattr(verb, "CONFIG", False))
    check_options(parser, words, getattr(verb, "CONFIG", False))
    args = parser.parse_args([word for number, word in enumerate(words) if number not in overrides])
    args.overrides = list(overrides.values())
    return int(verb.run(args))


def parser_of(name: str) -> argparse.ArgumentParser:
    """Returns what reads the options of a verb."""
    verb: Any = import_module(f"shardwise.cli.{name}")
    parser = _Parser(
        prog=f"shardwise {name}", description=verb.HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "section.key=value words change the config; `shardwise init` writes a file with all keys."
    verb.add_arguments(parser)
    if getattr(verb, "REPORTS", False):
        parser.add_argument("--json", action="store_true", help="machine-readable report")
    parser.add_argument("--plain", action="store_true", help="ASCII lines without colour, nothing drawn anew")
    return parser


def _overrides(parser: argparse.ArgumentParser, words: list[str], takes_config: bool) -> dict[int, str]:
    """Returns the `section.key=value` words by where they stand. A word after an option that takes a value is that
    value."""
    takes_value = {name for name, action in options_of(parser).items() if action.nargs is None}
    free = {n: word for n, word in enumerate(words) if n == 0 or words[n - 1] not in takes_value}
    for before, word in zip([parser.prog, *words], words, strict=False):
        if word.startswith("--") and word.rstrip().endswith("="):  # --out=""
            before, word = word.rstrip("= "), ""
        if not word.strip() and before != "--prompt" and "completion" not in parser.prog:
            why = 'often it was a variable of the shell that is not set, as in "$CONFIG"'
            raise UserError(f"an empty word after `{before}`", why=why, fix="leave it out, or set the variable")
    if (
        takes_config
    ):  # a key without its section, often another framework's, is one too: the loader has the answer to it
        return {number: word for number, word in free.items() if SETTING.match(word) and not os.path.exists(word)}
    for word in free.values():
        if OVERRIDE.match(word):
            raise UserError(
                f"`{word}` cannot be used with `{parser.prog}`", why="it reads no config", fix="leave it out"
            )
    return {}


class _Parser(argparse.ArgumentParser):
    """Turns argparse's complaints into three lines."""

    def error(self, message: str) -> Any:
        usage = " ".join(self.format_usage().split())
        if match := re.fullmatch(r"argument (\S+?)(?:/\S+)?: invalid (int|float) value: '(.*)'", message):
            message = f"{match[1]} takes a {'whole ' * (match[2] == 'int')}number, not `{match[3]}`"
        near = self._nearest(message)
        fix = f"did you mean `{near}`? " if near else ""
        raise UserError(message, why=usage, fix=f"{fix}`{self.prog} --help` lists every option")

    def _nearest(self, message: str) -> str | None:
        """Returns the option or choice that is most like the word which argparse complains about."""
        import difflib

        if match := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message):
            known = [word.strip().strip("'") for word in match[2].split(",")]
            return next(
                iter(difflib.get_close_matches(match[1].lower(), known, n=1)), known[0] if len(known) == 1 else None
            )
        if "--prompt" in options_of(self) and re.match("unrecognized arguments: [^-]", message):
            return "--prompt TEXT"
        word = next((word for word in message.split() if word.startswith("-")), "").partition("=")[0]
        if not word or not message.startswith("unrecognized"):
            return None
        word = f"--{word.lstrip('-')}"  # a dash too few
        close = difflib.get_close_matches(word, options_of(self), n=1, cutoff=0.7)
        close += [name for name in options_of(self) if len(word) > 2 and name.startswith(word)]
        parts = word.strip("-").split("-")  # --max-new-tokens is --max-tokens, with a word too many
        longer = [name for name in options_of(self) if len(parts) > 2 and set(name.strip("-").split("-")) < set(parts)]
        return next(iter([*close, *longer]), None)


def overview() -> str:
    """Returns what `shardwise --help` prints."""
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
