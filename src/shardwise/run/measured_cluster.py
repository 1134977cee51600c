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
from shardwise.parallel.mesh import Group, own_group
from shardwise.run.block_times import block_times
from shardwise.spec.cluster import ClusterSpec, Device, Link
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

TURNS = 7  # runs of each measurement
PROBE_BYTES = 2**16
COLLECTIVE_S = 0.15  # seconds that one measured collective may take, as far as it is longer than the probe


def measured_cluster(
    spec: ModelSpec, plan: Plan, config: Config, device: torch.device, bucket_bytes: int, nodes: int = 1
) -> tuple[ClusterSpec, BlockTimes | None]:
    """Collective. Returns the rates of this machine and the links of the job's `nodes` machines as measured, and the
    times of the model's blocks; None instead of these for a model that is not ours.

    It leaves no trace: neither in torch's random numbers nor in the peak of a GPU's memory.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        found = _measured(spec, plan, config, device, bucket_bytes, nodes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return found


def _measured(
    spec: ModelSpec, plan: Plan, config: Config, device: torch.device, bucket_bytes: int, nodes: int
) -> tuple[ClusterSpec, BlockTimes | None]:
    found, per_node = this_cluster(this_machine().times(nodes)), plan.world // nodes
    here = _rated(found.device, spec, plan, device)
    tiers: tuple[Link, ...] = (_link(plan.world, device, bucket_bytes, found.tiers[-1]),)
    if nodes > 1 and per_node > 1:
        inside = own_group(
            [list(range(first, first + per_node)) for first in range(0, plan.world, per_node)], dist.get_rank()
        )
        tiers = (_link(per_node, device, bucket_bytes, found.tiers[0], inside), *tiers)
    cluster = ClusterSpec("measured", nodes, per_node, here, tiers)
    if not spec.is_ours:
        return cluster, None
    if plan.world > 1:
        dist.barrier()
    times = block_times(spec, plan, config.model.attention, config.optimizer, device)
    model_s, optimizer_s = _mean([times.model_s, times.optimizer_s or 0.0], device)
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


def _link(world: int, device: torch.device, bucket_bytes: int, known: Link, group: Group = None) -> Link:
    """Returns the link between `world` ranks with its measured latency and bandwidth: those of this rank's `group`, or
    all of them. Every node measures at the same time. Timed are an all-reduce of one
    gradient bucket and of one element, and the bucket's all-gather and reduce-scatter as ZeRO does them, which gloo
    does no faster than a whole all-reduce."""
    if world == 1:
        return replace(known, span=1)
    elements = max(1, min(bucket_bytes, 16 * 2**20) // 4 // world)
    probe = torch.zeros(PROBE_BYTES // 4, device=device)
    [probed] = _mean([_seconds(lambda: dist.all_reduce(probe, group=group), device)], device)
    elements = min(elements, max(1, int(len(probe) * COLLECTIVE_S / probed) // world))  # slow links: less of it
    small, part = (torch.zeros(n, device=device) for n in (1, elements))
    whole = torch.zeros(world * elements, device=device)
    actions = (
        lambda: dist.all_reduce(small, group=group),
        lambda: dist.all_reduce(whole, group=group),
        lambda: all_gather_single(whole, part, group=group),
        lambda: reduce_scatter_single(part, whole, group=group),
    )
    quick, summed, gathered, scattered = _mean([_seconds(action, device) for action in actions], device)
    hops, moved = world - 1, (world - 1) / world * whole.nbytes
    rate = moved / max((gathered + scattered) / 2 - quick / 2, 1e-9)
    sums = 2 * moved / max(summed - quick, 1e-9)
    return Link(known.name, world, rate, quick / (2 * hops), 1.0, 0.0, summing=sums / rate)


def _mean(values: list[float], device: torch.device) -> list[float]:
    """Collective. Returns the mean of each value over all ranks."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return (tensor / dist.get_world_size()).tolist()


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    return median_seconds([action], device, turns=TURNS)[0]
