"""The baselines: what a careful person writes with torch alone, DistributedDataParallel and FSDP2 (`fully_shard`)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from peers.setting import Batch, Done, Setting, Step, mean_loss


def torch_ddp(setting: Setting) -> Step:
    model = setting.new_model()
    replica = DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = setting.new_optimizer(model)

    def step(batch: list[Batch]) -> Done:
        total = 0.0
        for index, micro in enumerate(batch):
            with nullcontext() if index == len(batch) - 1 else replica.no_sync():
                loss = mean_loss(replica, micro, len(batch))
                loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        return Done(total, norm)

    return step


def torch_fsdp2(setting: Setting, *, reshard: bool) -> Step:
    """`reshard=True` is ZeRO-3. False keeps parameters from forward to backward: one gather less, much like ZeRO-2."""
    model = setting.new_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.get_submodule(setting.blocks).children():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    root: Any = fully_shard(
        model, mesh=mesh
    )  # what blocks do not own: embedding, last norm, head; the root's default is to keep
    optimizer = setting.new_optimizer(model)

    def step(batch: list[Batch]) -> Done:
        total = 0.0
        for index, micro in enumerate(batch):
            root.set_requires_gradient_sync(index == len(batch) - 1)
            loss = mean_loss(model, micro, len(batch))
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        return Done(total, norm)

    return step
