"""Shares the writing of a checkpoint out among ranks: every distinct slice is written once, by one of those that hold
it, so that all write about as many bytes.

A pure function of what every rank holds: each rank computes it and comes to the same answer. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardwise.checkpoint.manifest import ITEM_BYTES, Shape, check_tiles


class HeldSlice(NamedTuple):
    """A box of a tensor that some rank holds. Slices that are equal hold the same elements."""

    group: str
    name: str
    dtype: str
    offsets: Shape
    shape: Shape

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class WriteTask(NamedTuple):
    """A slice, who writes it, and who sends it there: mostly the writer itself."""

    slice: HeldSlice
    writer: int
    sender: int


@dataclass
class SharedOut:
    """Who writes what. Tasks stand in one order on every rank: that of the bytes in files, and of sends."""

    tasks: list[WriteTask]
    shapes: dict[tuple[str, str], Shape] = field(default_factory=dict)  # of whole tensors, by group and name

    def writers(self, group: str) -> list[int]:
        """Returns the ranks that write a file of a group, in order."""
        return sorted({task.writer for task in self.tasks if task.slice.group == group})

    def all_writers(self) -> list[int]:
        """Returns the ranks that write anything, in order."""
        return sorted({task.writer for task in self.tasks})

    def groups(self) -> list[str]:
        """Returns the groups that have tensors, in the order they are written in."""
        return list(dict.fromkeys(group for group, _ in self.shapes))


def share_out(held: Sequence[Sequence[HeldSlice]], sees: Sequence[bool]) -> SharedOut:
    """Returns who writes what, from what each rank holds and whether it sees the directory. What is held by blind ranks
    alone is sent to one that sees. Raises ValueError where the slices do not make up whole tensors."""
    holders: dict[HeldSlice, list[int]] = {}
    for rank, slices in enumerate(held):
        for one in slices:
            holders.setdefault(one, []).append(rank)
    boxes: dict[tuple[str, str], list[HeldSlice]] = {}
    for one in holders:
        boxes.setdefault((one.group, one.name), []).append(one)
    shapes = {}
    for (group, name), parts in sorted(boxes.items()):
        ends = zip(*([start + extent for start, extent in zip(p.offsets, p.shape, strict=True)] for p in parts))
        shapes[group, name] = tuple(max(of_dim) for of_dim in ends)
        if len({part.dtype for part in parts}) > 1:
            raise ValueError(f"{name} is held in several number formats: {sorted({part.dtype for part in parts})}")
        check_tiles(name, shapes[group, name], [(part.offsets, part.shape) for part in parts])
    loads = [0 if seen else math.inf for seen in sees]  # bytes
    tasks = []
    for one in sorted(holders, key=lambda one: (-one.nbytes, one)):
        able = [rank for rank in holders[one] if sees[rank]]
        writer = min(able or range(len(sees)), key=lambda rank: (loads[rank], rank))
        loads[writer] += one.nbytes
        tasks.append(WriteTask(one, writer, writer if able else holders[one][0]))
    # The order within a file: widest elements first, so that all of them are aligned.
    tasks.sort(key=lambda task: (task.slice.group, -ITEM_BYTES[task.slice.dtype], task.slice.name, task.slice.offsets))
    return SharedOut(tasks, shapes)
