"""Reads JSON that somebody else wrote, within limits: model directories, adapters, manifests, indexes.

A file of this kind may be damaged, or made to do harm. Invariant: what comes back is a value of at most DEPTH levels
from a regular file of at most BYTES bytes; everything else is a `ValueError` (or an `OSError`) with a sentence that a
caller can show as the reason of its own three lines. No file is read that never ends, and no parser runs out of stack.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.files import open_regular

BYTES = 32 * 2**20  # the index of a model with a hundred thousand tensors has 10 MB
DEPTH = 64  # configs of the hub have fewer than 10 levels


def read_object(path: Path) -> dict[str, Any]:
    """Returns the object that a JSON file holds; raises ValueError for anything else that it may hold."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"it is not a JSON object but {_kind(found)}")
    return found


def read_json(path: Path) -> Any:
    """Returns the value that a JSON file holds."""
    with open_regular(path) as file:
        content = file.read(BYTES + 1)
    return parse_json(content)


def parse_json(content: bytes, limit: int = BYTES) -> Any:
    """Returns the value that JSON in UTF-8 spells, in at most `limit` bytes."""
    if len(content) > limit:
        raise ValueError(f"it has more than {limit >> 20} MiB, the limit for a file of this kind")
    try:
        found = json.loads(content.decode("utf-8"))
    except RecursionError:
        raise _too_deep() from None
    level: list[Any] = [found]
    for _ in range(DEPTH + 1):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return found
    raise _too_deep()


def read_safetensors_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns a safetensors file's table of contents and where its data begins, in bytes (an 8-byte length, JSON, then
    the tensors)."""
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(min(length, BYTES + 1)))
    if not isinstance(header, dict) or not all(isinstance(about, dict) for about in header.values()):
        raise ValueError("its table of contents is not one of safetensors")
    return header, 8 + length


def need(found: dict[str, Any], key: str, kind: type) -> Any:
    """Returns the value of a key that must be there and of a kind; raises ValueError otherwise."""
    if key not in found:
        raise ValueError(f"`{key}` is missing")
    if not isinstance(found[key], kind) or (kind is int and isinstance(found[key], bool)):
        raise ValueError(f"`{key}` is {_kind(found[key])} where {_NAMES[kind]} is needed")
    return found[key]


_NAMES = {dict: "an object", list: "a list", str: "text", int: "a whole number"}


def _kind(value: Any) -> str:
    return _NAMES.get(type(value), f"{json.dumps(value)[:40]}")


def _too_deep() -> ValueError:
    return ValueError(f"it is nested more than {DEPTH} levels deep")
