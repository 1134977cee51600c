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

from shardwise.checkpoint.part_file import NAMED, TORCH
from shardwise.checkpoint.reader import SliceReader
from shardwise.checkpoint.share_out import HeldSlice
from shardwise.checkpoint.store import Checkpoint
from shardwise.optim.offload.cpu import StreamingOptimizer
from shardwise.optim.offload.optimizer import OffloadedOptimizer
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
        _restore_weights([shard for shard in engine.shards if shard.local.requires_grad], reader)
        for name, buffer in engine.buffers().items():
            buffer.copy_(reader.read("weights", name))
        if isinstance(optimizer, StreamingOptimizer):
            optimizer.reload_masters()
        if isinstance(optimizer, OffloadedOptimizer):  # one after the other: all of them may not fit into memory
            put_own_states(engine, optimizer, _read_in_turn(engine, reader))
        else:
            places = list(_own_states(engine, reader))
            reader.read_boxes((part, "optimizer", key, offsets) for key, part, offsets in places)
            put_own_states(engine, optimizer, ((key, part) for key, part, _ in places))
        for kind, generator in _generators(engine).items():
            if kind in reader.tensors("rng"):
                _restore_generator(generator, reader, kind, engine.mesh.rank)
        return reader.num_bytes


def _restore_weights(shards: list[Shard], reader: SliceReader) -> None:
    """Reads weights straight to where they are, if that is CPU memory, else one after the other."""
    near = [shard for shard in shards if shard.elsewhere.write is None and shard.local.device.type == "cpu"]
    reader.read_boxes((shard.local.detach(), "weights", shard.name, shard.offsets) for shard in near)
    for shard in near:
        shard.update_low_precision()
    away = {id(shard) for shard in shards} - {id(shard) for shard in near}
    for shard in (shard for shard in shards if id(shard) in away):
        part = torch.empty(shard.local.shape, dtype=shard.local.dtype)
        reader.read_into(part, "weights", shard.name, shard.offsets)
        shard.put_own(part)


def _own_states(engine: Engine, reader: SliceReader) -> Iterator[tuple[str, Tensor, tuple[int, ...]]]:
    """Yields names as "exp_avg/NAME", room for this rank's part, and where that begins in the whole state."""
    stored, weights = reader.tensors("optimizer"), reader.tensors("weights")
    by_name: dict[str, list[str]] = {}
    for key in stored:
        by_name.setdefault(key.split("/", 1)[-1], []).append(key)
    for shard in (shard for shard in engine.shards if shard.local.requires_grad):
        for key in by_name.get(shard.name, ()):
            about = stored[key]
            is_cut = bool(about.shape) and about.shape == weights[shard.name].shape
            shape, offsets = (shard.local.shape, shard.offsets) if is_cut else (about.shape, (0,) * len(about.shape))
            yield key, torch.empty(shape, dtype=TORCH[about.dtype]), offsets


def _read_in_turn(engine: Engine, reader: SliceReader) -> Iterator[tuple[str, Tensor]]:
    for key, part, offsets in _own_states(engine, reader):
        reader.read_into(part, "optimizer", key, offsets)
        yield key, part


def _restore_generator(generator: torch.Generator, reader: SliceReader, kind: str, rank: int) -> None:
    """Sets a generator to what the rank of this number had. Where there was none it goes on from its seed."""
    about = reader.about("rng", kind)
    if len(about.shape) == 1:  # of an earlier version: one for all ranks
        generator.set_state(reader.read("rng", kind))
    elif rank < about.shape[0]:
        row = torch.empty((1, about.shape[1]), dtype=torch.uint8)
        reader.read_into(row, "rng", kind, (rank, 0))
        generator.set_state(row[0])
