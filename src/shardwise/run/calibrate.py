"""A quick look at what this machine reaches right now, with all ranks busy: the numbers behind the predicted step time."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from shardwise.cluster.spec import ClusterSpec, Device, Link
from shardwise.model.precision import COMPUTED
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan


def measured_cluster(spec: ModelSpec, plan: Plan, device: torch.device, bucket_bytes: int) -> ClusterSpec:
    """This machine as one rank of it finds it: the model's own matmul shape, a memory copy, and one gradient bucket around the ranks. About
    half a second."""
    dtype = COMPUTED[plan.precision]
    rows = min(plan.micro_batch * plan.seq_len, 8192)
    x = torch.randn(rows, spec.hidden, device=device, dtype=dtype)
    w = torch.randn(spec.hidden, max(layer.ffn for layer in spec.layers), device=device, dtype=dtype)
    flops = 2 * rows * spec.hidden * w.shape[1] / _seconds(lambda: x @ w, device)
    block = torch.zeros(8 * 2**20, device=device)
    other = torch.empty_like(block)
    copied = 2 * block.nbytes / _seconds(lambda: other.copy_(block), device)
    here = Device(
        name=str(device),
        memory=0,
        flops={plan.precision.removesuffix("-true"): flops},
        achievable=1.0,
        bandwidth=copied,
        bandwidth_share=1.0,
        kind=device.type,
    )
    link = Link("local", plan.world, float("inf"), 0.0, 1.0, 0.0)
    if plan.world > 1:
        large = torch.zeros(max(1, min(bucket_bytes, 16 * 2**20) // 4), device=device)
        small = torch.zeros(1, device=device)
        latency = _seconds(lambda: dist.all_reduce(small), device)
        seconds = _seconds(lambda: dist.all_reduce(large), device)
        link = Link("local", plan.world, large.nbytes / max(seconds - latency, 1e-9), latency, 1.0, 0.0)
    return ClusterSpec("measured", 1, plan.world, here, (link,))


def _seconds(action: Callable[[], object], device: torch.device, repeats: int = 7) -> float:
    """The best of a few tries: what the machine can do, not what else it was doing."""

    def once() -> float:
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(repeats))
