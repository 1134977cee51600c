"""Reads the schema into a table: one `Key` per config key, from the dataclasses of schema.py.

Everything that treats keys alike (loader, writer, `init`, docs) walks this table instead of the dataclasses. Invariant:
the order is the order of schema.py. `model.overrides` is not a key: its entries are written as keys of [model].
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any

from shardwise.spec import schema

COMMAND_LINE = "command line"  # origins that are not a place in a file
DEFAULT = "default"

Origins = Mapping[str, str]
"""Where the value of each key was written: `run.toml:14`, COMMAND_LINE or DEFAULT."""

ALIASES = MappingProxyType({"parallel.sp": "parallel.sequence"})


@dataclass(frozen=True)
class Key:
    """One config key: where it stands, what it takes and what it means."""

    section: str
    name: str
    default: Any
    kinds: frozenset[type]  # scalar types it takes: int, float, bool, str
    item: type | None  # type of the entries when it takes a list
    length: int | None  # number of entries when that is fixed
    optional: bool  # may be unset (None)
    auto: bool  # takes "auto"
    words: tuple[str, ...] = ()  # other words it takes beside its own kind of value
    help: str = ""
    choices: tuple[str, ...] | None = None
    available: tuple[Any, ...] | None = None
    unit: str | None = None
    low: float | None = None
    high: float | None = None
    above: float | None = None
    later: bool = False
    example: str | None = None

    @property
    def dotted(self) -> str:
        return f"{self.section}.{self.name}"


def make_key(section: str, name: str, hint: Any, default: Any, about: Mapping[str, Any]) -> Key:
    """Returns a `Key` from a type annotation and the metadata that `schema.setting` attached."""
    kinds: set[type] = set()
    words: tuple[str, ...] = ()
    item, length, optional, auto = None, None, False, False
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    for part in typing.get_args(hint) if is_union else (hint,):
        if part is type(None):
            optional = True
        elif typing.get_origin(part) is typing.Literal:
            if typing.get_args(part) == ("auto",):
                auto = True
            elif is_union:
                words += typing.get_args(part)
            else:  # ModelSpec spells its choices in the annotation
                kinds.add(str)
                about = {**about, "choices": typing.get_args(part)}
        elif typing.get_origin(part) is tuple:
            entries = typing.get_args(part)
            item = entries[0]
            length = None if Ellipsis in entries else len(entries)
        else:
            kinds.add(part)
    return Key(section, name, default, frozenset(kinds), item, length, optional, auto, words, **about)


@cache
def section_classes() -> Mapping[str, type]:
    """Returns the dataclass of each section, in the order of `Config`."""
    return MappingProxyType(dict(typing.get_type_hints(schema.Config)))


@cache
def all_keys() -> Mapping[str, Key]:
    """Returns every `Key` by its dotted name, in the order of schema.py."""
    table: dict[str, Key] = {}
    for section, cls in section_classes().items():
        hints = typing.get_type_hints(cls)
        for entry in fields(cls):
            if (section, entry.name) == ("model", "overrides"):
                continue
            key = make_key(section, entry.name, hints[entry.name], entry.default, entry.metadata)
            table[key.dotted] = key
    return MappingProxyType(table)


def keys_of(section: str) -> tuple[Key, ...]:
    """Returns the keys of one section, in the order of schema.py."""
    return tuple(key for key in all_keys().values() if key.section == section)


@cache
def model_spec_keys() -> Mapping[str, Key]:
    """Returns the ModelSpec fields that may be overridden in [model]: those that hold a plain value, but for the
    model's name."""
    from shardwise.spec.model import ModelSpec  # torch-free; here because `config` starts before any model is named

    hints = typing.get_type_hints(ModelSpec)
    own = {key.name for key in keys_of("model")}
    table = {}
    for entry in fields(ModelSpec):
        key = make_key("model", entry.name, hints[entry.name], None, {})
        is_plain = key.item in (None, int, float, bool, str) and key.kinds <= {int, float, bool, str}
        if entry.name not in own and entry.name != "name" and is_plain:
            table[entry.name] = key
    return MappingProxyType(table)


def where_written(origins: Origins, *names: str) -> str | None:
    """Returns the last place where somebody wrote one of these keys; None if all have their defaults."""
    written = [origins[name] for name in names if origins.get(name, DEFAULT) != DEFAULT]
    return written[-1] if written else None
