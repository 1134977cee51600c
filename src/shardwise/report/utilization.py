"""Finds the peak that a run's MFU is measured against: the published figure of a known GPU (cluster/gpus.toml), else
what was measured."""

from __future__ import annotations

import torch

from shardwise.cluster.describe.here import table_name
from shardwise.cluster.describe.machine import Gpu
from shardwise.cluster.describe.table import table_device
from shardwise.spec.cluster import ClusterSpec

FROZEN_FLOPS = 2 / 3
"""The share of a step's matmuls that is computed when weights are frozen: their gradients are not. MFU counts what
there is to compute."""


def peak_flops(world: int, device: torch.device, measured: ClusterSpec, *, is_frozen: bool) -> float:
    """Returns the FLOP/s of all ranks together, dense in bf16; for a device that is not in the table, the matmul rate
    measured at the start."""
    peak = _published(device) or max(measured.device.flops.values())
    return peak * world / (FROZEN_FLOPS if is_frozen else 1.0)


def _published(device: torch.device) -> float | None:
    """Returns a GPU's published bf16 FLOP/s; None for one that is not in the table, and for CPUs."""
    if device.type != "cuda":
        return None
    about = torch.cuda.get_device_properties(device)
    kind = table_name(Gpu(about.name, about.total_memory, (about.major, about.minor)))
    return None if kind is None else table_device(kind).flops.get("bf16")
