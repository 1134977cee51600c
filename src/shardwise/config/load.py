"""Turns a TOML file and `section.key=value` words into one frozen `Config`, with the origin of every value.

Later wins: defaults, then the file, then the words from left to right. Nothing heavy is imported, so every mistake in a
config is found in a blink. Invariant: each key of the result has an entry in `origins`. Read next: schema.py (the
keys), values.py (one value), check.py (rules between keys).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.config.check import check_config
from shardwise.config.keys import (
    ALIASES,
    COMMAND_LINE,
    DEFAULT,
    Key,
    all_keys,
    keys_of,
    model_spec_keys,
    section_classes,
)
from shardwise.config.lines import key_lines, parse_toml
from shardwise.config.unknown import key_without_section, unknown_key, unknown_section
from shardwise.config.unreadable import no_such_file, not_a_file
from shardwise.config.values import read_typed, read_value, toml_or_text
from shardwise.errors import UserError
from shardwise.files import read_text
from shardwise.spec.layout import parse_layout
from shardwise.spec.schema import Config

# Keys that say the same thing in different units. One given on the command line displaces one given in the file.
EXCLUSIVE = (
    ("train.steps", "train.tokens", "train.epochs"),
    ("train.global_batch", "train.global_batch_tokens"),
    ("model.preset", "model.path"),
)


@dataclass(frozen=True)
class Loaded:
    """A checked config and where each value came from: `"train.steps" -> "run.toml:14" | "command line" |
    "default"`."""

    config: Config
    origins: dict[str, str]


@dataclass(frozen=True)
class _Given:
    """One value somebody wrote, checked on its own."""

    key: Key
    value: Any
    where: str


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Reads, merges and checks; returns the config. Raises `UserError` for every mistake a person can make."""
    from_words = _collect((_read_word(word) for word in overrides), later_wins=True)
    from_file = _collect(_read_file(Path(path))) if path is not None else {}
    for group in EXCLUSIVE:
        if any(name in from_words for name in group):
            for name in group:
                from_file.pop(name, None)
    # A layout string is a shorthand for other keys; it competes only with keys of its own level.
    given = _with_layout(from_file) | _with_layout(from_words)
    config = _build(given)
    origins = dict.fromkeys(all_keys(), DEFAULT) | {name: entry.where for name, entry in given.items()}
    check_config(config, origins)
    return Loaded(config, origins)


def _build(given: Mapping[str, _Given]) -> Config:
    sections = {}
    for section, cls in section_classes().items():
        own = {key.name for key in keys_of(section)}
        mine = {entry.key.name: entry.value for entry in given.values() if entry.key.section == section}
        values = {name: value for name, value in mine.items() if name in own}
        if section == "model":
            values["overrides"] = tuple(sorted((name, value) for name, value in mine.items() if name not in own))
        sections[section] = cls(**values)
    return Config(**sections)


def _collect(entries: Iterator[_Given], later_wins: bool = False) -> dict[str, _Given]:
    found: dict[str, _Given] = {}
    for entry in entries:
        earlier = found.get(entry.key.dotted)
        if earlier is not None and not later_wins:
            raise _set_twice(entry.key.dotted, earlier.where, entry.where)
        found[entry.key.dotted] = entry
    return found


def _set_twice(name: str, first: str, second: str) -> UserError:
    return UserError(
        f"`{name}` is set twice", why=f"it is also set at {first}", fix="keep one of the two", where=second
    )


def find_key(dotted: str, raw: Any = None) -> Key:
    """Returns a key by its full name; unknown ones are refused with a suggestion, in which `raw` is the value."""
    section, dot, name = dotted.partition(".")
    if not dot:
        raise key_without_section(dotted, raw, COMMAND_LINE)
    if section not in section_classes():
        raise unknown_section(section, {}, COMMAND_LINE)
    return _find_key(section, name, raw, COMMAND_LINE)


def _find_key(section: str, name: str, raw: Any, where: str) -> Key:
    """Returns the key, or raises the error for a name we do not have."""
    dotted = ALIASES.get(f"{section}.{name}", f"{section}.{name}")
    if key := all_keys().get(dotted):
        return key
    if section == "model" and (key := model_spec_keys().get(name)):
        return key
    raise unknown_key(section, name, raw, where)


# --- the file ---------------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> Iterator[_Given]:
    text = _file_text(path)
    try:
        document = parse_toml(text)
    except tomllib.TOMLDecodeError as problem:
        raise _syntax_error(path, text, str(problem)) from None
    except RecursionError:
        raise UserError(
            f"{path} nests too deeply", why="a config has sections and keys, no more", fix="flatten it"
        ) from None
    lines: dict[tuple[str, ...], int] = {}
    for keys, line in key_lines(text):
        lines.setdefault(keys, line)

    def where(*keys: str) -> str:
        return f"{path}:{lines[keys]}" if keys in lines else str(path)

    for section, table in document.items():
        if section not in section_classes() or not isinstance(table, dict):
            if section in section_classes():
                raise _not_a_section(section, where(section))
            raise unknown_section(section, table, where(section))
        for name, raw in table.items():
            key = _find_key(section, name, raw, where(section, name))
            yield _Given(key, read_value(key, raw, where(section, name)), where(section, name))


def _file_text(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError:
        raise no_such_file(path) from None
    except IsADirectoryError:
        raise not_a_file(path) from None
    except UnicodeDecodeError as problem:
        why = f"byte {problem.start} is not UTF-8, which TOML requires"
        raise UserError(f"{path} is not a text file", why=why, fix="save it as UTF-8, or give another file") from None
    except OSError as problem:
        why = f"the system says: {problem.strerror or problem}"
        raise UserError(f"cannot read {path}", why=why, fix="check the path and its permissions") from None


def _not_a_section(section: str, where: str) -> UserError:
    return UserError(
        f"`{section}` is a section, not a key",
        why=f"its keys are: {', '.join(key.name for key in keys_of(section))}",
        fix=f"open it with `[{section}]` on a line of its own",
        where=where,
    )


def _syntax_error(path: Path, text: str, problem: str) -> UserError:
    """Returns `tomllib`'s complaint, with the slip people make most where the line shows it."""
    position = re.search(r"\(at (?:line (\d+), column (\d+)|end of document)\)", problem)
    last = text.count("\n") + 1
    line = int(position[1]) if position and position[1] else last
    where, plain = f"{path}:{line}", problem.partition(" (at ")[0]
    if "overwrite" in plain or "twice" in plain or "Cannot" in plain:
        seen: dict[tuple[str, ...], int] = {}
        for keys, number in key_lines(text):
            if keys in seen and number <= line:
                return _set_twice(".".join(keys), f"{path}:{seen[keys]}", f"{path}:{number}")
            seen.setdefault(keys, number)
    source = text.splitlines()[line - 1].strip() if line <= len(text.splitlines()) else ""
    fix = "see toml.io, or start from `shardwise init`"
    if bare := re.match(r"""([\w.-]+)\s*=\s*([^"'\[{#\s][^#]*?)\s*(?:#.*)?$""", source):
        name, value = bare.groups()
        lower = value.lower()
        fixed = lower if lower in ("true", "false") else f'"{value}"'
        fix = "leave the key out" if lower in ("none", "null") else f"write `{name} = {fixed}`"
    elif re.match(r"[\w.-]+\s*=\s*(?:#.*)?$", source):
        fix = "give it a value, or put `#` before the line"
    elif text.lstrip().startswith("{"):
        fix = "this looks like JSON: TOML writes a line `[section]`, and then lines `key = value`"
    elif re.match(r"[\w.-]+\s*:", source):
        fix = "this looks like YAML: TOML writes a line `[section]`, and then lines `key = value`, not `key: value`"
    return UserError(f"{path} is not valid TOML", why=f"line {line}: {plain}", fix=fix, where=where)


# --- the command line -------------------------------------------------------------------------------------------------


def _read_word(word: str) -> _Given:
    name, equals, text = word.partition("=")
    name = name.strip().lstrip("-")
    if not equals:
        fix = f"write `{name}=VALUE`" if "." in name else "write `section.key=VALUE`, for example `train.steps=100`"
        raise UserError(f"`{word}` has no `=`", why="a setting is `section.key=value`", fix=fix, where=COMMAND_LINE)
    if not text.strip():
        why = "a setting is one word, `section.key=value`, with no space around the ="
        raise UserError(f"`{word}` has no value", why=why, fix=f"write `{name}=VALUE`", where=COMMAND_LINE)
    key = find_key(name, toml_or_text(text.strip()))
    return _Given(key, read_value(key, read_typed(key, text), COMMAND_LINE), COMMAND_LINE)


# --- parallel.layout --------------------------------------------------------------------------------------------------


def _with_layout(given: dict[str, _Given]) -> dict[str, _Given]:
    """Returns the values with `parallel.layout` replaced by the keys it stands for."""
    layout = given.get("parallel.layout")
    if layout is None:
        return given
    result = {name: entry for name, entry in given.items() if name != "parallel.layout"}
    for name, text in parse_layout(layout.value, layout.where).items():
        key = all_keys()[name]
        value = read_value(key, read_typed(key, text), layout.where)
        other = given.get(name)
        if other is not None and other.value != value:
            raise UserError(
                f"`parallel.layout` and `{name}` disagree",
                why=f"the layout says {value}, `{name}` says {other.value} ({other.where})",
                fix="keep one of the two",
                where=layout.where,
            )
        result[name] = _Given(key, value, layout.where)
    return result
