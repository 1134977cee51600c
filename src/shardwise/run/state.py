"""A run's state between layouts and files: every tensor is saved whole under its global name and cut again on loading.

So a checkpoint knows nothing of the layout that wrote it, and any other layout can read it. Rank 0 writes; it needs memory for
the whole state while it does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.store import Checkpoint
from shardwise.parallel.collect import collect
from shardwise.parallel.engine import Engine
from shardwise.parallel.shards import Shard


def collect_state(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Tensor]]:
    """Collective. The groups of a checkpoint; complete on rank 0."""

    def states(shard: Shard) -> dict[str, Tensor]:
        found = optimizer.state[shard.local].items()
        return {f"{key}/{shard.name}": value for key, value in found if isinstance(value, Tensor)}

    return {
        "weights": collect(engine, lambda shard: {shard.name: shard.local}, engine.buffers()),
        "optimizer": collect(engine, states),
        "rng": {"cpu": torch.get_rng_state()},
    }


@torch.no_grad()
def restore_state(engine: Engine, optimizer: torch.optim.Optimizer, checkpoint: Checkpoint) -> None:
    """Every rank reads only what it holds."""
    with checkpoint.open("weights") as file:
        for shard in engine.shards:
            shard.put(file.get_tensor(shard.name))
        for name, buffer in engine.buffers().items():
            buffer.copy_(file.get_tensor(name))
    by_name = {shard.name: shard for shard in engine.shards}
    saved: dict[str, dict[str, Tensor]] = {}
    with checkpoint.open("optimizer") as file:
        for key in file.keys():  # noqa: SIM118  (not a mapping)
            state, name = key.split("/", 1)
            if name in by_name:
                value = file.get_tensor(key)
                is_shard = value.ndim > 0
                saved.setdefault(name, {})[state] = by_name[name].take(value).clone() if is_shard else value
    _put_states(engine, optimizer, saved)
    torch.set_rng_state(checkpoint.load("rng")["cpu"])


def _put_states(engine: Engine, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """torch's own loading knows where each optimizer wants its counters (CPU or device)."""
    names = {id(shard.local): shard.name for shard in engine.shards}
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {number: dict(saved[names[id(p)]]) for number, p in enumerate(ordered) if names[id(p)] in saved}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
