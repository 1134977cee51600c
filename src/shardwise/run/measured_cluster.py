"""This machine as the ranks of a run find it when they start: the numbers behind the predicted step time.

The planner's own prediction is asked for what was measured (block_times.py), and the device's rates are scaled until it says the same; then it is asked
for the whole step. So there is one formula, and what is measured is only how far this machine is from it. About two seconds. All ranks
measure at once and take the mean. Read next: plan/prediction/step_time.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from types import MappingProxyType

import torch
import torch.distributed as dist

from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import this_machine
from shardwise.model.dtypes import COMPUTED
from shardwise.parallel.fsdp2 import all_gather_single, reduce_scatter_single
from shardwise.plan.prediction.kernels import Pricer
from shardwise.plan.prediction.rank_share import rank_shares
from shardwise.plan.prediction.stack import OURS
from shardwise.plan.prediction.state_time import optimizer_seconds
from shardwise.plan.prediction.step_time import STEP_HOST, step_seconds
from shardwise.run.block_times import BlockTimes, block_times
from shardwise.spec.cluster import ClusterSpec, Curve, Device, Link
from shardwise.spec.job import Job, job_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

REPEATS = 7
CURVE_SIZES = tuple(4.0**power for power in range(6, 18))  # bytes of passes over memory: 4 KiB to 16 GiB


def measured_cluster(
    spec: ModelSpec, plan: Plan, config: Config, device: torch.device, bucket_bytes: int
) -> ClusterSpec:
    """Collective. Leaves no trace: neither in torch's random numbers nor in the peak of a GPU's memory."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        cluster = _measured(spec, plan, config, device, bucket_bytes)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return cluster


def _measured(spec: ModelSpec, plan: Plan, config: Config, device: torch.device, bucket_bytes: int) -> ClusterSpec:
    found = this_cluster(this_machine())
    here = _rated(found.device, spec, plan, device)
    cluster = ClusterSpec("measured", 1, plan.world, here, (_link(plan, device, bucket_bytes, found.tiers[0]),))
    if not spec.is_ours:
        return cluster
    if plan.world > 1:
        dist.barrier()
    times = block_times(spec, plan, config.model.attention, config.optimizer, device)
    model_s, optimizer_s = _mean([times.model_s, times.optimizer_s or 0.0], plan, device)
    times = replace(times, model_s=model_s, optimizer_s=optimizer_s or None)
    return _scaled(cluster, spec, plan, job_of(config, plan), times)


def _rated(known: Device, spec: ModelSpec, plan: Plan, device: torch.device) -> Device:
    """One core, or one GPU: the model's own matmul shape, and a copy."""
    dtype, threads = COMPUTED[plan.precision], plan.threads_per_rank if device.type == "cpu" else 1
    rows = min(plan.micro_batch * plan.seq_len, 8192)
    x = torch.randn(rows, spec.hidden, device=device, dtype=dtype)
    w = torch.randn(spec.hidden, max(layer.ffn for layer in spec.layers), device=device, dtype=dtype)
    flops = 2 * rows * spec.hidden * w.shape[1] / _seconds(lambda: x @ w, device)
    block = torch.zeros(8 * 2**20, device=device)
    other = torch.empty_like(block)
    copied = 2 * block.nbytes / _seconds(lambda: other.copy_(block), device)
    rates = MappingProxyType({plan.precision.removesuffix("-true"): flops / threads})
    return replace(known, flops=rates, achievable=1.0, bandwidth=copied / threads, bandwidth_share=1.0)


def _link(plan: Plan, device: torch.device, bucket_bytes: int, known: Link) -> Link:
    """One gradient bucket around the ranks, the smallest message, and the bucket gathered and scattered as ZeRO does it, which gloo does no faster
    than a whole sum."""
    if plan.world == 1:
        return replace(known, span=1)
    numbers = max(1, min(bucket_bytes, 16 * 2**20) // 4 // plan.world)
    small, part = (torch.zeros(n, device=device) for n in (1, numbers))
    whole = torch.zeros(plan.world * numbers, device=device)
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


def _scaled(cluster: ClusterSpec, spec: ModelSpec, plan: Plan, job: Job, times: BlockTimes) -> ClusterSpec:
    """With rates by which the blocks and the optimizer take as long as they did."""
    one = replace(cluster, per_node=1, tiers=(replace(cluster.tiers[0], span=1),))
    alone, device, slower = replace(job, adapter=Job(1, 1).adapter), cluster.device, 1.0
    points = _optimizer_points(spec, plan, job, times)
    around = STEP_HOST if device.kind == "cuda" else 0.0  # a step has it, blocks do not
    for _ in range(4):  # launches and passes do not scale alike
        scaled = _slower(device, slower, points)
        parts = step_seconds(times.spec, replace(one, device=scaled), alone, times.plan)
        predicted = sum(parts.get(name, 0.0) for name in ("compute", "launch")) - around
        slower *= times.model_s / predicted
    return replace(cluster, device=_slower(device, slower, points))


def _slower(device: Device, slower: float, points: Curve) -> Device:
    """Everything takes `slower` times as long, but for passes of the sizes in `points`."""
    scaled = replace(
        device,
        achievable=device.achievable / slower,
        bandwidth=device.bandwidth / slower,
        launch=device.launch * slower,
    )
    if not points:
        return scaled
    price = Pricer(scaled, "fp32", OURS)
    low, high = points[0][0] / 2, 2 * points[-1][0]
    usual = ((size, size / price.pass_(size)) for size in CURVE_SIZES if not low < size < high)
    return replace(scaled, curves=MappingProxyType({"elementwise": tuple(sorted((*usual, *points)))}))


class _Sizes(Pricer):
    """Notes the passes instead of pricing them."""

    def __init__(self) -> None:
        self.sizes: list[float] = []

    def pass_(self, size: float) -> float:
        self.sizes.append(size)
        return size


def _optimizer_points(spec: ModelSpec, plan: Plan, job: Job, times: BlockTimes) -> Curve:
    """The rate of the optimizer's passes, at the sizes that they have in a step."""
    if times.optimizer_s is None:
        return ()
    threads = plan.threads_per_rank if plan.device == "cpu" else 1
    moved = optimizer_seconds(times.numbers, 1, _Sizes(), plan, job, OURS)
    owned = max(share.num_parameters for share in rank_shares(spec, plan)) / plan.state_shards
    step = _Sizes()
    optimizer_seconds(owned, 1, step, plan, job, OURS)
    return tuple((size, moved / times.optimizer_s / threads) for size in sorted(step.sizes))


def _mean(values: list[float], plan: Plan, device: torch.device) -> list[float]:
    """Collective. Over all ranks."""
    if plan.world == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor)
    return (tensor / plan.world).tolist()


def _seconds(action: Callable[[], object], device: torch.device) -> float:
    """The median of a few tries; the first one warms up."""
    found = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found[1:])
