"""Moves a run's state between layouts and files: every tensor is saved whole under its global name and cut again on
loading.

So a checkpoint knows nothing of the layout that wrote it, and any other layout can read it. Rank 0 writes; it needs
memory for the whole state while it does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.checkpoint.store import Checkpoint
from shardwise.optim.offload.cpu import StreamingOptimizer
from shardwise.parallel.collect import collect, optimizer_states, put_optimizer_states
from shardwise.parallel.engine import Engine


def collect_state(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Collective. Returns the groups of tensors that a checkpoint has; they are complete on rank 0."""
    return {
        "weights": collect(engine, lambda s: {s.name: s.value} if s.local.requires_grad else {}, engine.buffers()),
        "optimizer": collect(engine, optimizer_states(optimizer)),
        "rng": {"cpu": torch.get_rng_state()},
    }


@torch.no_grad()
def restore_state(engine: Engine, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint's tensors into the engine and the optimizer. Every rank reads only what it holds."""
    with checkpoint.open("weights") as file:
        for shard in (shard for shard in engine.shards if shard.local.requires_grad):
            shard.put(file.get_tensor(shard.name))
        for name, buffer in engine.buffers().items():
            buffer.copy_(file.get_tensor(name))
    if isinstance(optimizer, StreamingOptimizer):
        optimizer.reload_masters()
    with checkpoint.open("optimizer") as file:
        mine = {shard.name for shard in engine.shards}
        keys = [key for key in file.keys() if key.split("/", 1)[1] in mine]  # noqa: SIM118  (not a mapping)
        put_optimizer_states(engine, optimizer, ((key, file.get_tensor(key)) for key in keys))
    torch.set_rng_state(checkpoint.load("rng")["cpu"])
