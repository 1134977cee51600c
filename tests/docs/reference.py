"""Makes docs/reference/config.md and docs/reference/commands.md from the code they describe.

    python tests/docs/reference.py          writes both files anew

test_reference.py fails when a file is not what this module makes. Everything is read from the schema and from the
verbs' own argument parsers, not from printed help, whose layout differs between Python versions.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from shardwise.cli.main import VERBS
from shardwise.config.keys import ALIASES, Key, keys_of, model_spec_keys, section_classes
from shardwise.config.write import is_built, with_unit

FOLDER = Path(__file__).parents[2] / "docs" / "reference"
KINDS = {int: "whole number", float: "number", bool: "true or false", str: "text"}
UNITS = {
    "binary": 'units of 1024: "8k"',
    "decimal": 'units of 1000: "1B"',
    "bytes": '"6GiB"',
    "time": '"90s", "5m", "2h"',
    "rate": '"50GB/s"',
}
MADE = "<!-- Made by `python tests/docs/reference.py`; a test fails when it is out of date. -->"


def config_page() -> str:
    lines = [
        "# Config keys",
        "",
        MADE,
        "",
        "A config is a TOML file with these sections; `shardwise init` writes one with comments. Every key can also be "
        "given on the",
        "command line as `section.key=value`, which wins over the file. An unknown key is an error with a suggestion, "
        "and so is a value",
        "that cannot work. What is not available yet is refused, never ignored.",
    ]
    for section, cls in section_classes().items():
        built = [key for key in keys_of(section) if is_built(key)]
        later = [key for key in keys_of(section) if not is_built(key)]
        lines += ["", f"## [{section}]", "", str(cls.__doc__)]
        if built:
            lines += ["", "| key | takes | default | meaning |", "|---|---|---|---|"]
            lines += [_row(key) for key in built]
        if section == "model":
            lines += [
                "",
                "Any field of the model's shape may be set here as well and replaces the preset's or the directory's:",
                "",
            ]
            lines += [", ".join(f"`{name}`" for name in model_spec_keys()) + "."]
        if later:
            lines += ["", "Not available yet:", "", "| key | meaning |", "|---|---|"]
            lines += [f"| `{key.name}` | {_cell(key.help)} |" for key in later]
    lines += ["", "## Other spellings", ""]
    lines += [f"- `{alias}` is `{name}`" for alias, name in ALIASES.items()]
    return "\n".join(lines) + "\n"


def _row(key: Key) -> str:
    default = "not set" if key.default is None else f"`{with_unit(key, key.default)}`"
    return f"| `{key.name}` | {_cell(_takes(key))} | {_cell(default)} | {_cell(_meaning(key))} |"


def _takes(key: Key) -> str:
    choices = key.available or key.choices
    if choices:
        listed = ", ".join(f"`{choice}`" for choice in choices)
        return f"a list of {listed}" if key.item else listed
    if key.item:
        many = f"{key.length} " if key.length else ""
        parts = [f"list of {many}{KINDS[key.item]}s" if KINDS[key.item].endswith("number") else f"list of {many}texts"]
    else:
        parts = []
    parts = [KINDS[kind] for kind in (int, float, bool, str) if kind in key.kinds] + parts
    if key.auto:
        parts.append("`auto`")
    named = {"at least": key.low, "above": key.above, "at most": key.high}
    bounds = [f"{name} {bound}" for name, bound in named.items() if bound is not None]
    return (
        " or ".join(parts) + (f"; {', '.join(bounds)}" if bounds else "") + (f"; {UNITS[key.unit]}" if key.unit else "")
    )


def _meaning(key: Key) -> str:
    missing = [choice for choice in key.choices or () if key.available is not None and choice not in key.available]
    return key.help + (f" (not available yet: {', '.join(f'`{choice}`' for choice in missing)})" if missing else "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def commands_page() -> str:
    lines = [
        "# Commands",
        "",
        MADE,
        "",
        "`shardwise COMMAND [options] [section.key=value ...]`. `shardwise COMMAND --help` prints the same as this "
        "page. RUN is a run",
        "directory, a name inside `runs`, or `last`. Exit codes are listed in "
        "[run-directory.md](run-directory.md#exit-codes).",
    ]
    for name in VERBS:
        lines += ["", f"## {name}", ""]
        lines += _verb(f"shardwise {name}", parser_of(name), str(import_module(f"shardwise.cli.{name}").HELP))
    return "\n".join(lines) + "\n"


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser `shardwise NAME` uses."""
    verb: Any = import_module(f"shardwise.cli.{name}")
    parser = argparse.ArgumentParser(prog=f"shardwise {name}")
    verb.add_arguments(parser)
    if getattr(verb, "REPORTS", False):
        parser.add_argument("--json", action="store_true", help="machine-readable report")
    return parser


def _verb(prog: str, parser: argparse.ArgumentParser, about: str) -> list[str]:
    below = next((action for action in parser._actions if isinstance(action, argparse._SubParsersAction)), None)
    if below is not None:
        helps = {choice.dest: choice.help or "" for choice in below._choices_actions}
        parts = (["", *_verb(f"{prog} {name}", child, helps[name])] for name, child in below.choices.items())
        return [line for part in parts for line in part][1:]
    actions = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    words = [_usage(action) for action in actions]
    rows = [f"| `{_name(action)}` | {_cell(_help(action))} |" for action in actions]
    sentence = about[0].upper() + about[1:]
    return [sentence, "", "```text", *_wrapped(prog, words), "```", "", "| word | meaning |", "|---|---|", *rows]


def _wrapped(prog: str, words: list[str], width: int = 120) -> Iterator[str]:
    line = prog
    for word in words:
        if len(line) + 1 + len(word) > width:
            yield line
            line = " " * len(prog)
        line += f" {word}"
    yield line


def _usage(action: argparse.Action) -> str:
    if not action.option_strings:
        many = "..." if action.nargs in ("+", "*") else ""
        return f"[{_name(action)}{many}]" if action.nargs in ("?", "*") else f"{_name(action)}{many}"
    text = (
        _name(action).split(", ")[-1]
        if len(action.option_strings) == 1
        else f"{action.option_strings[0]}{_value(action)}"
    )
    return text if action.required else f"[{text}]"


def _name(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest).upper()
    return ", ".join(action.option_strings) + _value(action)


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if action.choices:
        return " {" + ",".join(map(str, action.choices)) + "}"
    return f" {action.metavar or action.dest.upper()}"


def _help(action: argparse.Action) -> str:
    text = action.help or ""
    has_default = action.option_strings and action.nargs != 0 and action.default not in (None, [], argparse.SUPPRESS)
    if has_default and "default" not in text:
        text = f"{text} (default: {action.default})".strip()
    return text


PAGES = {"config.md": config_page, "commands.md": commands_page}

if __name__ == "__main__":
    for name, make in PAGES.items():
        (FOLDER / name).write_text(make(), encoding="utf-8")
        print(f"wrote {FOLDER / name}")
