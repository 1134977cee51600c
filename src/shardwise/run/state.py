"""Moves a run's state between layouts and files: every rank says which slices of which tensors it holds, under global
names, and on loading reads those that it needs.

So a checkpoint knows nothing of the layout that wrote it, and any other layout can read it. No rank ever has more of
the state than it holds. Read next: saving.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from shardwise.checkpoint.part_file import NAMED
from shardwise.checkpoint.reader import SliceReader
from shardwise.checkpoint.share_out import HeldSlice
from shardwise.checkpoint.store import Checkpoint
from shardwise.optim.offload.cpu import StreamingOptimizer
from shardwise.parallel.collect import one_state, put_own_states, state_shapes
from shardwise.parallel.engine import Engine
from shardwise.parallel.shards import Shard

GROUPS = ("weights", "optimizer", "rng")

Held = dict[HeldSlice, Callable[[], Tensor]]
"""What this rank holds, and how to get its elements."""


def held_slices(engine: Engine, optimizer: torch.optim.Optimizer) -> Held:
    """Returns the slices that this rank holds of what a checkpoint has. No element is moved yet."""
    found: Held = {}
    for shard in (shard for shard in engine.shards if shard.local.requires_grad and shard.local.numel()):
        own = HeldSlice("weights", shard.name, NAMED[shard.local.dtype], shard.offsets, tuple(shard.local.shape))
        found[own] = partial(getattr, shard, "value")
        for key, (shape, dtype) in sorted(state_shapes(optimizer, shard).items()):
            at = shard.offsets if shape == shard.local.shape else (0,) * len(shape)
            state = HeldSlice("optimizer", f"{key}/{shard.name}", NAMED[dtype], at, tuple(shape))
            found[state] = partial(one_state, optimizer, shard, key)
    for name, value in engine.buffers().items():
        own = HeldSlice("weights", name, NAMED[value.dtype], (0,) * value.ndim, tuple(value.shape))
        found[own] = value.detach
    for kind, generator in _generators(engine).items():
        own = HeldSlice("rng", kind, "U8", (engine.mesh.rank, 0), (1, generator.get_state().numel()))
        found[own] = partial(_state_row, generator)
    return found


def _generators(engine: Engine) -> dict[str, torch.Generator]:
    """Returns torch's own random generators by the kind of their device."""
    found = {"cpu": torch.default_generator}
    if engine.mesh.device.type == "cuda":
        found["cuda"] = torch.cuda.default_generators[engine.mesh.device.index or 0]
    return found


def _state_row(generator: torch.Generator) -> Tensor:
    return generator.get_state()[None]


@torch.no_grad()
def restore_state(engine: Engine, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> int:
    """Puts a checkpoint's tensors into the engine and the optimizer, and returns how many bytes this rank has read:
    only what it holds."""
    with checkpoint.open() as reader:
        for shard in (shard for shard in engine.shards if shard.local.requires_grad):
            _restore_weight(shard, reader)
        for name, buffer in engine.buffers().items():
            buffer.copy_(reader.read("weights", name))
        if isinstance(optimizer, StreamingOptimizer):
            optimizer.reload_masters()
        put_own_states(engine, optimizer, _own_states(engine, reader))
        for kind, generator in _generators(engine).items():
            if kind in reader.tensors("rng"):
                _restore_generator(generator, reader, kind, engine.mesh.rank)
        return reader.num_bytes


def _restore_weight(shard: Shard, reader: SliceReader) -> None:
    local = shard.local.detach()
    if shard.elsewhere.write is None and local.device.type == "cpu":
        reader.read_into(local, "weights", shard.name, shard.offsets)
        shard.put_own(local)  # where there is a low-precision weight it follows
        return
    part = torch.empty(local.shape, dtype=local.dtype)
    reader.read_into(part, "weights", shard.name, shard.offsets)
    shard.put_own(part)


def _own_states(engine: Engine, reader: SliceReader) -> Iterator[tuple[str, Tensor]]:
    """Yields this rank's parts of the optimizer's states, by "exp_avg/NAME"."""
    stored = reader.tensors("optimizer")
    by_name: dict[str, list[str]] = {}
    for key in stored:
        by_name.setdefault(key.split("/", 1)[-1], []).append(key)
    weights = reader.tensors("weights")
    for shard in (shard for shard in engine.shards if shard.local.requires_grad):
        for key in by_name.get(shard.name, ()):
            if stored[key].shape and stored[key].shape == weights[shard.name].shape:
                part = torch.empty(shard.local.shape, dtype=_dtype(stored[key].dtype))
                reader.read_into(part, "optimizer", key, shard.offsets)
                yield key, part
            else:
                yield key, reader.read("optimizer", key)


def _dtype(name: str) -> torch.dtype:
    return next(dtype for dtype, known in NAMED.items() if known == name)


def _restore_generator(generator: torch.Generator, reader: SliceReader, kind: str, rank: int) -> None:
    """Sets a generator to what the rank of this number had. Where there was none it goes on from its seed."""
    about = reader.about("rng", kind)
    if len(about.shape) == 1:  # of an earlier version: one for all ranks
        generator.set_state(reader.read("rng", kind))
    elif rank < about.shape[0]:
        row = torch.empty((1, about.shape[1]), dtype=torch.uint8)
        reader.read_into(row, "rng", kind, (rank, 0))
        generator.set_state(row[0])
