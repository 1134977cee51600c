"""Answers an option that no verb has, such as `--lr 3`, and a setting in other signs, such as `optimizer.lr: 3`, with
the setting that is meant: `optimizer.lr=3`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence

from shardwise.errors import UserError

WHY = "what a run does is set by config keys, written section.key=value without dashes"


FILES = ("--config", "--config-file", "--cfg", "-c")
SETTERS = ("--set", "--override", "--overrides")
"""What other commands have before a config file and before a setting."""
ALMOST = re.compile(r"(\w+\.\w+)\s*(\+=|:=|=|:|$)\s*(.*)")


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Returns every option of a verb by its spelling, those of its sub-commands too."""
    options = {spelling: action for action in parser._actions for spelling in action.option_strings}
    for action in parser._actions:
        if isinstance(action.choices, Mapping):  # sub-commands by their name
            for below in action.choices.values():
                options |= options_of(below)
    return options


def check_options(parser: argparse.ArgumentParser, words: Sequence[str], takes_config: bool) -> None:
    """Refuses the first word that begins like an option, is none of this verb's, and is the name of a config key, ours
    or another framework's. What is no key either is left to argparse."""
    known = options_of(parser)
    for number, word in enumerate(words):
        if word == "--":
            return
        name, equals, value = word.partition("=")
        before = known.get(words[number - 1]) if number else None
        is_value = before is not None and before.nargs is None
        if takes_config and not is_value:
            _check_setting(parser, words[number:])
        if not name.startswith("--") or is_value or any(option.startswith(name) for option in known):
            continue
        after = words[number + 1] if number + 1 < len(words) and not words[number + 1].startswith("--") else None
        bare = name.lstrip("-").replace("-", "_")
        hint = _hint(bare, value if equals else after)
        if hint is None:
            continue
        what = f"`{name}` is no option of `{parser.prog}`"
        if not takes_config:
            if not _is_key(bare):  # it is only like one: rather an option misspelt
                continue
            fix = f"leave it out; `{parser.prog} --help` lists every option"
            raise UserError(what, why="it is a key of a run's config, and this command reads no config", fix=fix)
        raise UserError(what, why=hint.why if "is a name of" in hint.why else WHY, fix=hint.fix)


def _check_setting(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """Refuses a first word that is meant as a setting, or stands before a setting or a config file, and is neither."""
    from shardwise.config.keys import all_keys

    name, equals, value = words[0].partition("=")
    value = value if equals else next(iter(words[1:]), "")
    is_option = name in options_of(parser)
    if name in FILES and not is_option and any(action.dest == "config" for action in parser._actions):
        why = "a config file stands by itself"
        raise UserError(f"`{name}` is no option of `{parser.prog}`", why=why, fix=f"`{parser.prog} {value or 'FILE'}`")
    if name in SETTERS and not is_option:
        raise UserError(f"`{name}` is no option of `{parser.prog}`", why=WHY, fix=f"leave out `{name}`")
    meant = ALMOST.fullmatch(words[0].strip())
    if not meant or meant[1] not in all_keys() or words[0].startswith(f"{meant[1]}=") or os.path.exists(words[0]):
        return
    key, sign, value = meant.groups()
    after = "".join(words[1:3])[1:] if words[1:2] == ["="] else "".join(words[1:2]).removeprefix("=")
    if not sign and not after.startswith("-") and "=" not in after and not os.path.exists(after):
        value = after
    raise UserError(
        f"`{words[0]}` sets nothing",
        why="a setting is one word, section.key=value, without blanks around the `=`",
        fix=f"write `{key}={value if value and sign != '+=' else 'VALUE'}`",
    )


def _is_key(name: str) -> bool:
    """Returns whether a key of the config has this name, with its section or without."""
    from shardwise.config.keys import all_keys

    return any(name in (key, key.partition(".")[2]) for key in all_keys())


def _hint(name: str, value: str | None) -> UserError | None:
    """Returns what the config has to say to a key of this name and value; None where it knows of no such key."""
    from shardwise.config.keys import COMMAND_LINE, all_keys, section_classes
    from shardwise.config.unknown import key_without_section, unknown_key
    from shardwise.config.values import toml_or_text

    section, dot, rest = name.partition(".")
    if name in all_keys():
        return UserError(name, why=WHY, fix=f"write `{name}={'VALUE' if value is None else value}`")
    if dot and section not in section_classes():
        return None
    raw = "VALUE" if value is None else toml_or_text(value)
    answer = unknown_key(section, rest, raw, COMMAND_LINE) if dot else key_without_section(name, raw, COMMAND_LINE)
    return None if "`shardwise init`" in answer.fix else answer
