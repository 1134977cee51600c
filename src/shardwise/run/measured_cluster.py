"""Measures this machine as the ranks of a run find it when they start: the numbers behind the predicted step time.

Measured are the matmul rate, a copy, the link between the ranks, and the model's own blocks (block_times.py). The
planner scales the device's rates until its prediction of the blocks is what they took
(plan/prediction/measured_rates.py). About two seconds. All ranks measure at once and take the mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import MappingProxyType

import torch
import torch.distributed as dist

from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import this_machine
from shardwise.cluster.measure.blocks import BlockTimes
from shardwise.kernels.timing import median_seconds
from shardwise.model.dtypes import COMPUTED
from shardwise.parallel.fsdp2 import all_gather_single, reduce_scatter_single
from shardwise.run.block_times import block_times
from shardwise.spec.cluster import ClusterSpec, Device, Link
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

TURNS = 7  # runs of each measurement


def measured_cluster(
    spec: ModelSpec, plan: Plan, config: Config, device: torch.device, bucket_bytes: int
) -> tuple[ClusterSpec, BlockTimes | None]:
    """Collective. Returns the rates and the link of this machine as measured, and the times of the model's blocks; None
    instead of these for a model that is not ours.

    It leaves no trace: neither in torch's random numbers nor in the peak of a GPU's memory.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        found = _measured(spec, plan, config, device, bucket_bytes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


def _measured(
    spec: ModelSpec, plan: Plan, config: Config, device: torch.device, bucket_bytes: int
) -> tuple[ClusterSpec, BlockTimes | None]:
    found = this_cluster(this_machine())
    here = _rated(found.device, spec, plan, device)
    cluster = ClusterSpec("measured", 1, plan.world, here, (_link(plan, device, bucket_bytes, found.tiers[0]),))
    if not spec.is_ours:
        return cluster, None
    if plan.world > 1:
        dist.barrier()
    times = block_times(spec, plan, config.model.attention, config.optimizer, device)
    model_s, optimizer_s = _mean([times.model_s, times.optimizer_s or 0.0], plan, device)
    return cluster, replace(times, model_s=model_s, optimizer_s=optimizer_s or None)


def _rated(known: Device, spec: ModelSpec, plan: Plan, device: torch.device) -> Device:
    """Returns one core, or one GPU, with its measured matmul rate (in the model's own shape) and copy rate."""
    dtype, threads = COMPUTED[plan.precision], plan.threads_per_rank if device.type == "cpu" else 1
    rows = min(plan.micro_batch * plan.seq_len, 8192)
    x = torch.randn(rows, spec.hidden, device=device, dtype=dtype)
    w = torch.randn(spec.hidden, max(layer.ffn for layer in spec.layers), device=device, dtype=dtype)
    flops = 2 * rows * spec.hidden * w.shape[1] / _seconds(lambda: x @ w, device)
    block = torch.zeros(8 * 2**20, device=device)
    other = torch.empty_like(block)
    copied = 2 * block.nbytes / _seconds(lambda: other.copy_(block), device)
    rates = MappingProxyType({plan.formats.matmul: flops / threads})
    return replace(known, flops=rates, achievable=1.0, bandwidth=copied / threads, bandwidth_share=1.0)


def _link(plan: Plan, device: torch.device, bucket_bytes: int, known: Link) -> Link:
    """Returns the link between the ranks with its measured latency and bandwidth. Timed are an all-reduce of one
    gradient bucket and of one element, and the bucket's all-gather and reduce-scatter as ZeRO does them, which gloo
    does no faster than a whole all-reduce."""
    if plan.world == 1:
        return replace(known, span=1)
    elements = max(1, min(bucket_bytes, 16 * 2**20) // 4 // plan.world)
    small, part = (torch.zeros(n, device=device) for n in (1, elements))
    whole = torch.zeros(plan.world * elements, device=device)
    actions = (
        lambda: dist.all_reduce(small),
        lambda: dist.all_reduce(whole),
        lambda: all_gather_single(whole, part),
        lambda: reduce_scatter_single(part, whole),
    )
    quick, summed, gathered, scattered = _mean([_seconds(action, device) for action in actions], plan, device)
    hops, moved = plan.world - 1, (plan.world - 1) / plan.world * whole.nbytes
    rate = moved / max((gathered + scattered) / 2 - quick / 2, 1e-9)
    sums = 2 * moved / max(summed - quick, 1e-9)
    return Link(known.name, plan.world, rate, quick / (2 * hops), 1.0, 0.0, summing=sums / rate)


def _mean(values: list[float], plan: Plan, device: torch.device) -> list[float]:
    """Collective. Returns the mean of each value over all ranks."""
    if plan.world == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return (tensor / plan.world).tolist()


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    return median_seconds([action], device, turns=TURNS)[0]
