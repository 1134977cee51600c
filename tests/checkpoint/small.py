"""A small checkpoint as two ranks write it, in chunks of a page, for tests that damage it."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from shardwise.checkpoint import part_file, store
from shardwise.checkpoint.part_file import NAMED, SliceSource
from shardwise.checkpoint.share_out import HeldSlice, share_out

CHUNK = 4096
GROUPS = ("weights", "optimizer", "rng")


def tensors(step: int, rows: int = 50) -> dict[str, dict[str, Tensor]]:
    draw = torch.Generator().manual_seed(step)
    weights = {f"layer.{i}.weight": torch.randn(24, 40, generator=draw) for i in range(6)}
    weights |= {"norm.weight": torch.randn(40, generator=draw), "embed.weight": torch.randn(rows, 40, generator=draw)}
    states = {f"exp_avg/{name}": value + 1 for name, value in weights.items()}
    counters = {f"step/{name}": torch.tensor(float(step)) for name in weights}
    return {"weights": weights, "optimizer": states | counters, "rng": {"cpu": torch.randint(0, 9, (2, 500)).byte()}}


def save(parent: Path, step: int, state: dict[str, Any], keep: int = 9, rows: int = 50) -> None:
    """Two ranks hold halves of every matrix, and all of the rest."""
    whole = {(group, name): value for group, named in tensors(step, rows).items() for name, value in named.items()}
    held: list[list[HeldSlice]] = []
    for rank in (0, 1):
        mine = []
        for (group, name), value in whole.items():
            half = value.shape[0] // 2 if value.ndim > 1 else 0
            shape = (half, *value.shape[1:]) if half else tuple(value.shape)
            offsets = (rank * half, *[0] * (value.ndim - 1)) if half else (0,) * value.ndim
            mine.append(HeldSlice(group, name, NAMED[value.dtype], offsets, shape))
        held.append(mine)
    shared = share_out(held, [True, True])
    with patch.object(part_file, "CHUNK", CHUNK), patch.object(store, "CHUNK", CHUNK):
        scratch = store.begin(parent, step)
        for rank in (1, 0):
            sources = []
            for one, writer, _ in shared.tasks:
                if writer == rank:
                    value = whole[one.group, one.name]
                    for dim, (start, extent) in enumerate(zip(one.offsets, one.shape, strict=True)):
                        value = value.narrow(dim, start, extent)
                    sources.append(SliceSource(one, shared.shapes[one.group, one.name], value.detach))
            store.write_part(scratch, rank, shared, sources)
        store.commit(scratch, parent / f"step-{step}", step, state, shared.all_writers(), GROUPS)
        store.keep_newest(parent, keep)


def is_whole(checkpoint: store.Checkpoint) -> bool:
    """Whether what is read is what was saved for its step."""
    rows = checkpoint.manifest().tensors("weights")["embed.weight"].shape[0]
    for group, named in tensors(checkpoint.step, rows).items():
        found = checkpoint.load(group)
        if found.keys() != named.keys():
            return False
        if group != "rng" and not all(torch.equal(found[name], value) for name, value in named.items()):
            return False
    return True
