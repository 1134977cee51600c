"""Writes YAML with the reason of a value in the line above it. Reading YAML is for a library; writing a tree of plain
values takes these few lines, and no library keeps comments."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Noted:
    """A value, and why it is so."""

    value: Any
    why: str


def document(tree: dict[str, Any]) -> str:
    """Returns one document. Keys that have no value (None) are left out."""
    return "\n".join(_mapping(tree, "")) + "\n"


def _mapping(tree: dict[str, Any], indent: str) -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Noted):
            yield f"{indent}# {value.why}"
            value = value.value
        if value is None:
            continue
        if isinstance(value, dict) and value:
            yield f"{indent}{_scalar(key)}:"
            yield from _mapping(value, indent + "  ")
        elif isinstance(value, list) and value:
            yield f"{indent}{_scalar(key)}:"
            yield from _sequence(value, indent + "  ")
        elif isinstance(value, str) and _is_block(value):
            yield f"{indent}{_scalar(key)}: |"
            yield from (f"{indent}  {line}" if line else "" for line in value[:-1].split("\n"))
        else:
            yield f"{indent}{_scalar(key)}: {_scalar(value)}"


def _sequence(items: list[Any], indent: str) -> Iterator[str]:
    for item in items:
        if isinstance(item, Noted):
            yield f"{indent}# {item.why}"
            item = item.value
        if isinstance(item, dict) and item:
            first, *rest = _mapping(item, indent + "  ")
            while first.lstrip().startswith("#"):  # a note on the first key stands above the item
                yield first
                first, *rest = rest
            yield f"{indent}- {first.removeprefix(indent + '  ')}"
            yield from rest
        else:
            yield f"{indent}- {_scalar(item)}"


def _is_block(text: str) -> bool:
    """Returns whether a text can stand as it is, in lines of its own."""
    lines = text[:-1].split("\n")
    plain = all(line.replace("\t", "").isprintable() for line in lines)
    return text.endswith("\n") and plain and bool(lines[0]) and not lines[0][0].isspace() and bool(lines[-1].strip())


def _scalar(value: Any) -> str:
    """Returns a value in one line. What could be read as something else than the text that it is stands in quotes."""
    if isinstance(value, str) and value and value.replace("-", "").replace(".", "").replace("/", "").isalnum():
        is_word = value[0].isalpha() and value.isascii() and value.lower() not in AMBIGUOUS
        return value if is_word else json.dumps(value)
    return json.dumps(value)


AMBIGUOUS = ("true", "false", "yes", "no", "on", "off", "y", "n", "null", "none")
