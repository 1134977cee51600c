"""Answers names and spellings of other frameworks with ours. The table itself is data: foreign.toml.

Invariant (tested): every answer names a key that exists in schema.py. Read next: unknown.py, which turns an answer into
an error.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class ForeignName:
    """What a name of another framework is called here.

    key    ours; None where there is nothing to set
    same   the value carries over as it is, so the answer can show the finished line
    """

    name: str
    key: str | None
    origin: str
    say: str
    same: bool = False


@cache
def _table() -> Mapping[str, Any]:
    with open(Path(__file__).with_name("foreign.toml"), "rb") as file:
        return tomllib.load(file)


@cache
def foreign_names() -> Mapping[str, ForeignName]:
    """Returns the answers by normalised foreign name."""
    names = {
        name: ForeignName(name, entry.get("key"), entry["from"], entry["say"], entry.get("same", False))
        for name, entry in _table()["names"].items()
    }
    return MappingProxyType(names)


def foreign_name(name: str) -> ForeignName | None:
    """Returns the answer for a name, or None. Megatron's `--tensor-model-parallel-size` and a config's
    `tensor_model_parallel_size` are one name.

    `section.name` asks for names that mean something only there, such as torchtitan's `model.name`.
    """
    return foreign_names().get(name.lstrip("-").replace("-", "_").lower())


def foreign_section(name: str) -> str | None:
    return _table()["sections"].get(name.lower())


def spellings(dotted_key: str) -> Mapping[str, str]:
    """Returns other spellings of this key's values, lower case -> ours."""
    return _table()["values"].get(dotted_key, {})
