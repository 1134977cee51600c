"""A cluster whose rates are those that the ranks of a run measured as they started (run/measured_cluster.py). No torch.

The prediction is asked for what was measured, and the device's rates are scaled until it says the same; then it is
asked for the whole step. So there is one formula, and what is measured is only how far this machine is from it. Read
next: step_time.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

from shardwise.cluster.measure.blocks import BlockTimes
from shardwise.plan.prediction.kernels import Pricer
from shardwise.plan.prediction.rank_share import rank_shares
from shardwise.plan.prediction.stack import OURS
from shardwise.plan.prediction.state_time import optimizer_passes
from shardwise.plan.prediction.step_time import STEP_HOST, step_seconds
from shardwise.spec.cluster import ClusterSpec, Curve, Device
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan

CURVE_SIZES = tuple(4.0**power for power in range(6, 18))  # bytes of passes over memory: 4 KiB to 16 GiB


def scaled_cluster(cluster: ClusterSpec, spec: ModelSpec, plan: Plan, job: Job, times: BlockTimes) -> ClusterSpec:
    """Returns the cluster whose rates predict for the blocks and the optimizer what they took."""
    one = replace(cluster, nodes=1, per_node=1, tiers=(replace(cluster.tiers[0], span=1),))
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
    """Returns the device on which everything takes `slower` times as long, but for passes of the sizes in `points`."""
    achievable, bandwidth, launch = device.achievable / slower, device.bandwidth / slower, device.launch * slower
    scaled = replace(device, achievable=achievable, bandwidth=bandwidth, launch=launch)
    if not points:
        return scaled
    price = Pricer(scaled, "fp32", OURS)
    low, high = points[0][0] / 2, 2 * points[-1][0]
    usual = ((size, size / price.pass_(size)) for size in CURVE_SIZES if not low < size < high)
    return replace(scaled, curves=MappingProxyType({"elementwise": tuple(sorted((*usual, *points)))}))


def _optimizer_points(spec: ModelSpec, plan: Plan, job: Job, times: BlockTimes) -> Curve:
    """Returns the rate of the optimizer's passes over memory: bytes per second at the sizes in bytes that they have in
    a step."""
    if times.optimizer_s is None:
        return ()
    threads = plan.threads_per_rank if plan.device == "cpu" else 1
    rate = sum(optimizer_passes(times.elements, plan, job.optimizer, OURS)) / times.optimizer_s / threads
    owned = max(share.num_parameters for share in rank_shares(spec, plan)) / plan.state_shards
    return tuple((size, rate) for size in sorted(optimizer_passes(owned, plan, job.optimizer, OURS)))
