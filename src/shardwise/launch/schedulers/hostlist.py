"""Reads SLURM's way of writing many node names in few characters, without asking SLURM: `gpu[01-03,7]-ib,login`."""

from __future__ import annotations

import re
from itertools import product as combinations
from math import prod

from shardwise.errors import UserError

MOST_NODES = 1 << 17  # twice what SLURM itself allows in a cluster


def expand(text: str) -> tuple[str, ...]:
    """Returns the names of a host list in its order; a range keeps the leading zeros of its first number."""
    item = r"(?:[^,\[\]\s]|\[[^\[\]]*\])+"
    if not re.fullmatch(f"{item}(?:,{item})*", text):
        raise _unreadable(text, "names and ranges in brackets are expected, as in gpu[01-03,7]")
    names: list[str] = []
    for one in re.findall(item, text):
        parts = re.split(r"\[([^\[\]]*)\]", one)  # text and contents of brackets in turn
        choices = [_numbers(part, text) if at % 2 else [part] for at, part in enumerate(parts)]
        if len(names) + prod(map(len, choices)) > MOST_NODES:
            raise _unreadable(text, f"it names more than {MOST_NODES:,} nodes")
        names += ("".join(words) for words in combinations(*choices))
    return tuple(names)


def _numbers(inside: str, text: str) -> list[str]:
    """Returns the numbers of one pair of brackets as they are written."""
    found: list[str] = []
    for one in inside.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", one.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if match is None or not first <= last < first + MOST_NODES:
            raise _unreadable(text, f"`[{inside}]` is no list of numbers and ranges")
        found += (f"{number:0{len(match[1])}d}" for number in range(first, last + 1))
    return found


def _unreadable(text: str, why: str) -> UserError:
    return UserError(f"cannot read the node list `{text[:80]}`", why=why, fix="`scontrol show hostnames` lists a job's")
