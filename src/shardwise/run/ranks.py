"""Reads which rank this process is from torchrun's environment; without it, one process is alone. Nothing else reads
those variables."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Ranks:
    """Which rank a process is, of how many; `local` counts those of this machine only."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    heartbeat: str | None = None  # where its launcher reads signs of life (heartbeat.py); None: nobody does

    @property
    def is_supervised(self) -> bool:
        """Whether a launcher of ours watches this rank, and says how it ended."""
        return self.heartbeat is not None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """The number of machines, each with as many ranks as this one."""
        return -(-self.world // self.local_world)


def ranks_from_environment() -> Ranks:
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return Ranks()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Ranks(
        rank,
        world,
        int(os.environ.get("LOCAL_RANK", rank)),
        int(os.environ.get("LOCAL_WORLD_SIZE", world)),
        os.environ.get("SHARDWISE_HEARTBEAT"),
    )


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ
