"""Turns one raw value into a checked value, or a three-line error that names the key, the rule and what to type.

Order of the checks: other spellings -> type and unit -> range -> choices -> built yet. Invariant: a value that comes
out of `read_value` goes back in unchanged, so a written config reads as itself. Read next: load.py (calls this per
key).
"""

from __future__ import annotations

import difflib
import json
import math
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from datetime import date, time
from typing import Any, TypeVar

from shardwise.config import units
from shardwise.config.foreign import spellings
from shardwise.config.keys import Key
from shardwise.errors import UserError

Number = TypeVar("Number", int, float)

MOST_WHOLE = 2**63 - 1  # what a tensor, a file or the system can count
MOST_SECONDS = 1e9  # thirty years

_PARSE: Mapping[str, Callable[[str], float]] = {
    "binary": units.parse_binary,
    "decimal": units.parse_decimal,
    "bytes": units.parse_bytes,
    "time": units.parse_seconds,
    "rate": units.parse_rate,
}
_EXAMPLE = {"binary": '"8k"', "decimal": '"300M"', "bytes": '"6GiB"', "time": '"5m"', "rate": '"50GB/s"'}
_NOUN = {int: "a whole number", float: "a number", bool: "true or false", str: "text in quotes"}
_NOUNS = {int: "whole numbers", float: "numbers", bool: "true or false", str: "texts in quotes"}


def read_value(key: Key, raw: Any, where: str | None) -> Any:
    """Returns the value of `key` from what TOML gave, checked against everything schema.py says about it."""
    if isinstance(raw, str | int) and not isinstance(raw, bool):
        raw = spellings(key.dotted).get(str(raw).strip().lower(), raw)
    value = _typed(key, raw, where)
    for entry in value if isinstance(value, tuple) else (value,):
        _check_range(key, entry, where)
        _check_choice(key, entry, where)
    _check_available(key, value, where)
    return value


def read_amount(option: str, text: str, parse: Callable[[str], Number], example: str) -> Number:
    """Returns the number that was typed for an option, such as `--seq 8k`; what cannot be read or is not above zero is
    refused with an example."""
    fix = f"{option}{example}" if option.endswith("=") else f"{option} {example}"
    typed = fix.removesuffix(example) + text
    try:
        value = parse(text)
    except ValueError as problem:
        raise UserError(f"`{typed}` cannot be read", why=str(problem), fix=fix) from None
    if value <= 0:
        raise UserError(f"`{typed}` leaves nothing", why="it must be above 0", fix=fix)
    return value


def read_typed(key: Key, text: str) -> Any:
    """Returns what a person typed after `section.key=`: TOML when it parses and fits the key, else the text itself."""
    text = text.strip()
    value = toml_or_text(text)
    if key.item is not None and isinstance(value, str) and "," in text and not text.startswith(('"', "'")):
        parts = [part.strip() for part in text.split(",") if part.strip()]
        return parts if key.item is str else [toml_or_text(part) for part in parts]
    if isinstance(value, bool | int | float) and str in key.kinds | {key.item} and type(value) not in key.kinds:
        return text  # run.name=123 is a name
    if bool in key.kinds and text.lower() in ("true", "false"):
        return text.lower() == "true"
    return value


def shown(value: Any) -> str:
    """Returns a value the way it is written in a config file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        # JSON's escapes are TOML's, but for DEL, which TOML wants escaped and JSON does not.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(shown(entry) for entry in value)}]"
    if isinstance(value, date | time):
        return value.isoformat()
    if isinstance(value, dict):
        return f"{{{', '.join(f'{shown(name)} = {shown(entry)}' for name, entry in value.items())}}}"
    return repr(value) if value is not None else '"none"'


def example(key: Key) -> str:
    """Returns a value that this key takes, for the `fix` line."""
    if key.example is not None:
        return key.example
    if key.default not in (None, "auto", ()):
        return shown(key.default)
    if key.choices:
        return shown(next(choice for choice in key.choices if choice != "auto"))
    if key.unit:
        return _EXAMPLE[key.unit]
    if key.item is not None:
        entry = {int: "4", float: "0.5", str: '"a"', bool: "true"}[key.item]
        return f"[{entry}, {entry}]"
    if key.auto and not key.kinds & {int, float}:
        return '"auto"'
    if key.auto and int in key.kinds:
        return "2"  # a degree
    return {int: "100", float: "1.0", bool: "true"}.get(next(iter(key.kinds), str), '"..."')


def toml_or_text(text: str) -> Any:
    """Returns the value of a text: `3` is a number, `[1, 2]` a list, `6GiB` and `a.txt` are texts."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    value = parsed["value"]
    # A typed line break or comment could smuggle in more than the value, and a date is a name here.
    if (
        len(parsed) > 1
        or not isinstance(value, bool | int | float | str | list)
        or ("#" in text and text[0] not in "\"'[")
    ):
        return text
    return value


def _typed(key: Key, raw: Any, where: str | None) -> Any:
    if isinstance(raw, str):
        if (key.auto and raw == "auto") or raw in key.words:
            return raw
        if key.optional and str not in key.kinds and raw.strip().lower() == "none":
            return None
    if key.item is not None:
        if isinstance(raw, list):
            return _entries(key, raw, where)
        if isinstance(raw, str) and key.item is str and str not in key.kinds:
            return (raw,)
    value = _scalar(key, key.kinds, raw, where)
    if value is None:
        raise _wrong_type(key, raw, where)
    return value


def _entries(key: Key, raw: list[Any], where: str | None) -> tuple[Any, ...]:
    assert key.item is not None, key
    entries = tuple(_scalar(key, frozenset({key.item}), entry, where) for entry in raw)
    if None in entries or (key.length is not None and len(entries) != key.length):
        raise _wrong_type(key, raw, where)
    return entries


def _scalar(key: Key, kinds: frozenset[type], raw: Any, where: str | None) -> Any:
    """Returns `raw` as one of `kinds`, or None when it is none of them."""
    if isinstance(raw, bool):
        return raw if bool in kinds else None
    if isinstance(raw, str):
        if key.unit and kinds & {int, float}:
            return _with_unit(key, raw, where)
        return raw if str in kinds else None
    if isinstance(raw, int | float) and math.isfinite(raw):
        if int in kinds and raw == int(raw):
            return int(raw)
        if float in kinds:
            return float(raw)
    return None


def _with_unit(key: Key, raw: str, where: str | None) -> float:
    """Returns the number that a text with a unit stands for, in the unit of the key."""
    assert key.unit is not None, key
    try:
        value = _PARSE[key.unit](raw)
    except ValueError as problem:
        also = ' or "auto"' if key.auto else ""
        raise UserError(
            f"`{key.dotted}` cannot be read from {shown(raw)}",
            why=f"{problem}{also}",
            fix=f"for example `{key.dotted} = {_EXAMPLE[key.unit]}`",
            where=where,
        ) from None
    return value


def _wrong_type(key: Key, raw: Any, where: str | None) -> UserError:
    wanted = [_NOUN[kind] for kind in (int, float, bool, str) if kind in key.kinds]
    if key.item is not None:
        count = f"{key.length} " if key.length else ""
        wanted.append(f"a list of {count}{_NOUNS[key.item]}")
    wanted += [f'"{word}"' for word in (*(("auto",) if key.auto else ()), *key.words)]
    return UserError(
        f"`{key.dotted}` must be {' or '.join(wanted)}, got {shown_or_repr(raw)}",
        why=f"{key.name}: {key.help}" if key.help else f"it is a field of ModelSpec, {' or '.join(wanted)}",
        fix=f"for example `{key.dotted} = {example(key)}`",
        where=where,
    )


def shown_or_repr(raw: Any) -> str:
    return shown(raw) if isinstance(raw, bool | int | float | str | list | tuple | dict | date | time) else repr(raw)


def _check_range(key: Key, value: Any, where: str | None) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    high = key.high
    if high is None and (isinstance(value, int) or key.unit == "time"):
        high = MOST_SECONDS if key.unit == "time" else MOST_WHOLE
    too_low = (key.low is not None and value < key.low) or (key.above is not None and value <= key.above)
    too_high = high is not None and value > high
    if not too_low and not too_high:
        return
    rules = []
    if key.low is not None:
        rules.append(f"at least {key.low:g}")
    if key.above is not None:
        rules.append(f"above {key.above:g}")
    if high is not None and (too_high or key.high is not None):
        rules.append(f"at most {high:,}" if isinstance(high, int) else f"at most {high:,.10g}")
    raise UserError(
        f"`{key.dotted} = {shown(value)}` is out of range",
        why=f"it must be {' and '.join(rules)}" + (f" ({key.help})" if key.help else ""),
        fix=f"for example `{key.dotted} = {example(key)}`",
        where=where,
    )


def _check_choice(key: Key, value: Any, where: str | None) -> None:
    if key.choices is None or any(_is_choice(choice, value) for choice in key.choices):
        return
    if key.dotted == "parallel.fill_bubbles" and re.search(r"[/\\]|\.\w+$", str(value)):
        raise UserError(
            f"a second job in idle pipeline slots (`{key.dotted} = {shown(value)}`) is not available yet",
            why="held-out batches of the run itself are the only side work; another config's steps are not built",
            fix=f"{key.dotted}=eval",
            where=where,
        )
    raise UserError(
        f"`{key.dotted}` has no value {shown_or_repr(value)}",
        why=f"it takes: {', '.join(key.choices)}",
        fix=_nearest_choice(key.choices, str(value)) or f"for example `{key.dotted} = {example(key)}`",
        where=where,
    )


def _nearest_choice(choices: Sequence[str], typed: str) -> str | None:
    """Returns the fix for a slip of the fingers; None where nothing is near. Two names of different numbers are not
    near: who types fp4 does not mean fp64."""
    for choice in choices:
        if choice.endswith("-K") and typed.startswith(choice[:-1]):
            return f"K is a whole number above 0, for example `{choice[:-1]}2`"
    if typed.lower() in ("true", "false"):  # like no choice; the value that leaves it open, or off, is meant
        meant = "auto" if typed.lower() == "true" else "none"
        return f"write `{meant}`" if meant in choices else None
    close = difflib.get_close_matches(typed.lower(), choices, n=1, cutoff=0.5)
    numbers = [re.findall(r"\d+", word) for word in (typed, *close)]
    if not close or (all(numbers) and numbers[0] != numbers[1]):
        return None
    return f"did you mean `{close[0]}`?"


def _is_choice(choice: str, value: Any) -> bool:
    """Returns whether a value is one of a choice; `every-K` stands for every-1, every-2, ..."""
    if choice.endswith("-K"):
        return re.fullmatch(re.escape(choice[:-1]) + r"[1-9]\d*", str(value)) is not None
    return choice == value


def _check_available(key: Key, value: Any, where: str | None) -> None:
    if key.later:
        works: tuple[Any, ...] = (key.default,)
    elif key.available is not None:
        works = key.available
    else:
        return
    for entry in value if isinstance(value, tuple) and not key.later else (value,):
        if any(_same(entry, choice) for choice in works):
            continue
        listed = ", ".join(shown(choice) if choice is not None else "leaving it out" for choice in works)
        raise UserError(
            f"`{key.dotted} = {shown(entry)}` is not available yet",
            why=f"what works today: {listed}",
            fix=f"leave it out, or set `{key.dotted} = {shown(works[0])}`" if works[0] is not None else "leave it out",
            where=where,
        )


def _same(value: Any, choice: Any) -> bool:
    """Returns whether two values are equal and of one kind: False is not 0 here."""
    return value == choice and isinstance(value, bool) == isinstance(choice, bool)
