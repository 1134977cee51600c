"""Knows models by name: `preset("llama3-8b")` is the published shape, read from presets.toml.

Owns the table and its `extends` rule. No torch. Read next: `spec.py` for what the fields mean.
"""

from __future__ import annotations

import difflib
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from shardwise.errors import UserError
from shardwise.spec.model import ModelSpec


def preset_names() -> list[str]:
    return list(_table())


def preset(name: str) -> ModelSpec:
    table = _table()
    if name not in table:
        close = difflib.get_close_matches(name.lower(), table, n=3, cutoff=0.5)
        fix = f"did you mean `{'`, `'.join(close)}`?" if close else "choose a preset above, or give model.path"
        raise UserError(f"unknown preset `{name}`", why=f"presets are: {', '.join(table)}", fix=fix)
    return ModelSpec.from_dict({"name": name, **_resolve(table, name)})


def _resolve(table: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Returns the entry as written over the entry it extends: sizes left to be derived stay so until the end."""
    entry = dict(table[name])
    base = entry.pop("extends", None)
    return {**_resolve(table, base), **entry} if base else entry


@cache
def _table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files("shardwise.spec").joinpath("presets.toml").read_text(encoding="utf-8"))
