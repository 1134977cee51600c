"""Chooses the kind of offload that a plan asks for: state in CPU memory or on a disk, parameters where they are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from shardwise.optim.offload.buffer import Disk
from shardwise.optim.offload.cpu import StreamingOptimizer
from shardwise.optim.offload.nvme import NvmeOptimizer, state_names
from shardwise.optim.offload.nvme_model import NvmeModel
from shardwise.optim.offload.optimizer import Build, HeldParameter, OffloadedOptimizer
from shardwise.spec.plan import Plan


def offloaded_optimizer(
    shards: Iterable[HeldParameter], build: Build, plan: Plan, device: torch.device, disk: Disk | None = None
) -> OffloadedOptimizer:
    """Returns the optimizer that a plan asks for, over the shards that are trained. One without any state has nothing
    to put on a disk. `disk`: by default that of the plan's directory."""
    held = [shard for shard in shards if shard.local.requires_grad]
    home = held[0].local.device if held else device
    dtype = held[0].local.dtype if held else torch.float32
    if plan.offload_to == "nvme" and state_names(build, dtype)[0]:
        kind = NvmeModel if plan.offload == "all" else NvmeOptimizer
        return kind(held, build, home, disk or Disk(Path(plan.offload_dir)), plan.offload_buffer)
    return OffloadedOptimizer(held, build) if home.type == "cpu" else StreamingOptimizer(held, build, home, dtype)
