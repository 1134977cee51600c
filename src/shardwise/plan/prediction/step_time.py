"""Time of a step: what every stage computes and sends, put through the schedule that the runtime executes. No torch.

    step_seconds(model, cluster, job, plan)   seconds by part; their sum is the step
    least_step_seconds(...)                   at most that, without the simulation of the pipeline: for the search

A stage's forward and backward are as long as the device computes, or as the host needs to start it, whichever takes
longer; on top come sends that nothing hides. Without a pipeline a step is the sum over its micro-batches; with one,
the simulated schedule says how long ranks wait. Parts are those of the rank that is busiest. Read next: layer_time.py,
state_time.py, pipeline_time.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from shardwise.plan.prediction.activations import TokenShare, layer_activations
from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.collectives import network_of, odd_world, usual_span
from shardwise.plan.prediction.kernels import Pricer
from shardwise.plan.prediction.layer_time import LayerTime, LayerTimes, add
from shardwise.plan.prediction.lifetimes import as_saved
from shardwise.plan.prediction.pipeline_time import Simulate, least_pipeline_seconds, pipeline_seconds
from shardwise.plan.prediction.rank_share import RankShare, alike, rank_shares
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.state_time import StateTime, host_rate, offload_seconds, optimizer_seconds, state_time
from shardwise.plan.prediction.states import groups_of
from shardwise.plan.resolve.speed import stack_of
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.recompute import segments
from shardwise.spec.schedules import splits_backward, stage_owners

STRAGGLER = measured("straggler_share")
STEP_HOST = measured("step_host_seconds")


def straggler_share(cluster: ClusterSpec, world: int) -> float:
    """Returns the share of a step that so many ranks lose to the slowest of them."""
    return STRAGGLER * (cluster.nodes_of(world).bit_length() - 1)


class StageTime(NamedTuple):
    """The seconds of one micro-batch through one stage."""

    layers: LayerTime
    forward: float
    inputs: float
    weights: float
    launch: float  # of these, what the device waited for the host

    @property
    def backward(self) -> float:
        """The seconds of all gradients."""
        return self.inputs + self.weights


def step_seconds(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: Job,
    plan: Plan,
    stack: Stack | None = None,
    apart: bool = True,
    simulate: Simulate = pipeline_seconds,
) -> dict[str, float]:
    """Returns the seconds of a step by part. `apart`: separates waiting for sends between stages from other waiting,
    which takes as long again. `simulate`: how long the pipeline takes, from the prices of its stages."""
    times = layer_times(model, cluster, job, plan, stack or stack_of(plan))
    stages, shares = stage_times(model, plan, times), rank_shares(model, plan)
    owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages) if plan.pp > 1 else (0,)
    mine = [[stage for stage, owner in zip(stages, owners, strict=True) if owner == rank] for rank in range(plan.pp)]
    states = _state_times(shares, mine, cluster, plan, times)
    busy = [
        sum(stage.forward + stage.backward for stage in rank_stages) + state.each_forward + state.each_backward
        for rank_stages, state in zip(mine, states, strict=True)
    ]
    slowest = max(range(plan.pp), key=busy.__getitem__)
    parts = _rank_parts(mine[slowest], states[slowest], plan.num_microbatches)
    if plan.pp > 1:
        parts |= _pipeline(stages, owners, states, sum(parts.values()), times, plan, apart, simulate)
    parts["data-parallel"] += max(state.once for state in states)
    if plan.pp > 1 and model.tied:  # both ends have the table, and add up its gradients: of what a rank owns, if shared
        shards = plan.state_shards if plan.stage.reduces_every_microbatch else 1
        size = -(-model.vocab // plan.tp) * model.hidden * times.stack.tied_bytes / shards
        parts["data-parallel"] += times.network.all_reduce(size, 2, plan.world // plan.pp * (plan.pp - 1))
    parts["compute"] += states[slowest].casts_once
    trained = max(trained_parameters(share, times, plan) for share in shares)
    parts["optimizer"] = optimizer_seconds(trained, times, plan, job.optimizer)
    parts["offload"] = offload_seconds(trained, plan, cluster.per_node)
    if plan.activation_offload:
        parts["offload"] += plan.num_microbatches * paging_seconds(shares[slowest], mine[slowest], cluster, plan, times)
    parts["launch"] += STEP_HOST if plan.device == "cuda" else 0.0
    parts["straggler"] = straggler_share(cluster, plan.world) * sum(parts.values())
    return {name: seconds for name, seconds in parts.items() if seconds > 0 or name in ("compute", "optimizer")}


def least_step_seconds(model: ModelSpec, cluster: ClusterSpec, job: Job, plan: Plan, stack: Stack | None) -> float:
    """Returns the step's own price with the least that its pipeline can take in place of the simulation. Without a
    pipeline it is the step."""
    return sum(step_seconds(model, cluster, job, plan, stack, False, least_pipeline_seconds).values())


def trained_parameters(share: RankShare, times: LayerTimes, plan: Plan) -> float:
    """Returns the number of parameters that a rank updates."""
    trained = groups_of(share, times.model, times.adapter).whole.trained
    experts = share.spread_parameters if times.adapter.kind == "none" else 0
    return (trained - experts) / plan.state_shards + experts / plan.expert_shards


# Stages -------------------------------------------------------------------------------------------------------------

_TIMES: dict[object, LayerTimes] = {}


def layer_times(model: ModelSpec, cluster: ClusterSpec, job: Job, plan: Plan, stack: Stack) -> LayerTimes:
    """Returns the prices of a layout's layers. Layouts that cut layers alike share them."""
    world = _odd_groups(cluster, plan)
    cut = (plan.tp, plan.sequence, plan.cp, plan.cp_kind, plan.ep, plan.uses_fsdp, plan.recomputes.is_selective)
    size = (plan.precision, plan.micro_batch, plan.seq_len, plan.threads_per_rank, world)
    key = (model, cluster, stack, job.adapter, cut, size)
    found = _TIMES.get(key)
    if found is None:
        if len(_TIMES) > 2048:
            _TIMES.clear()
        pricer = _pricer(cluster, plan.precision, stack, plan.threads_per_rank)
        found = _TIMES[key] = LayerTimes(model, network_of(cluster, world), pricer, job, plan, stack)
    return found


@lru_cache(16)
def _pricer(cluster: ClusterSpec, precision: str, stack: Stack, threads: int) -> Pricer:
    """Returns one pricer for all layouts, because it remembers."""
    return Pricer(cluster.device, precision, stack, threads)


def _odd_groups(cluster: ClusterSpec, plan: Plan) -> int:
    """Returns `odd_world` for the sends inside of layers, where a group fits into a domain and does not divide it; else
    0."""
    span, usual = cluster.tiers[0].span, usual_span(cluster.tiers[0])
    is_odd = any(n < span and span % n and usual % n for n in (plan.tp, plan.tp * plan.cp, plan.ep))
    return odd_world(cluster, plan.world) if is_odd else 0


def stage_times(model: ModelSpec, plan: Plan, times: LayerTimes) -> list[StageTime]:
    """Returns the seconds of every stage, in model order. Layouts that split layers alike share them; who changes the
    list makes a copy."""
    found = times.stages.get((plan.split, plan.recompute))
    if found is not None:
        return found
    split = plan.split or (model.num_layers,)
    ranges = [range(stop - number, stop) for number, stop in zip(split, accumulate(split), strict=True)]
    first, last = times.ends
    found, known = [], {}
    for number, layers in enumerate(ranges):
        parts = segments(plan.recompute, layers)
        ends = [first] * (number == 0) + [last] * (number == len(ranges) - 1)
        key = (len(layers), sum(map(len, parts))) if times.are_alike and not ends else number
        if key not in known:
            again = {index for part in parts for index in part}
            total = times.stage([(model.layers[index], index in again) for index in layers])
            known[key] = stage_time(add((total, *ends)))
        found.append(known[key])
    times.stages[plan.split, plan.recompute] = found
    return found


def stage_time(layers: LayerTime) -> StageTime:
    """Returns the seconds of a stage with these layers: as long as the device or the host takes."""
    forward, backward, weights = layers.device_forward, layers.device_backward, layers.weights
    wait_forward, wait_backward = max(0.0, layers.host_forward - forward), max(0.0, layers.host_backward - backward)
    inputs, waits = backward + wait_backward - weights, wait_forward + wait_backward
    return StageTime(layers, forward + wait_forward, inputs, weights, waits)


# Ranks --------------------------------------------------------------------------------------------------------------


def _state_times(
    shares: tuple[RankShare, ...], mine: list[list[StageTime]], cluster: ClusterSpec, plan: Plan, times: LayerTimes
) -> list[StateTime]:
    """Returns the `StateTime` of each rank along the pipeline; ranks that hold and compute as much have one price."""
    network = network_of(cluster, odd_world(cluster, plan.world))
    kinds = alike(shares) if times.adapter.kind == "none" else range(plan.pp)
    known: dict[tuple[int, float, float], StateTime] = {}
    found = []
    for kind, share, stages in zip(kinds, shares, mine, strict=True):
        forward, backward = sum(s.forward for s in stages), sum(s.backward for s in stages)
        key = (kind, forward, backward)
        if key not in known:
            known[key] = state_time(share, forward, backward, network, times, plan)
        found.append(known[key])
    return found


def _rank_parts(stages: Sequence[StageTime], state: StateTime, number: int) -> dict[str, float]:
    """Returns the seconds of a rank by part, of `number` micro-batches."""
    layers = add([stage.layers for stage in stages])
    return {
        "compute": number * (layers.forward + layers.backward + state.casts_forward + state.casts_backward),
        "recompute": number * layers.again,
        "tensor-parallel": number * (layers.tensor_forward + layers.tensor_backward),
        "context-parallel": number * (layers.context_forward + layers.context_backward),
        "expert-parallel": number * (layers.expert_forward + layers.expert_backward),
        "data-parallel": number * (state.each_forward + state.each_backward),
        "launch": number * sum(stage.launch for stage in stages),
    }


def paging_seconds(
    share: RankShare, stages: Sequence[StageTime], cluster: ClusterSpec, plan: Plan, times: LayerTimes
) -> float:
    """Returns the seconds that one micro-batch's activations take longer than computing: they go to CPU memory beside
    forward and come back beside backward."""
    token_parts = plan.tp if plan.sequence else 1
    spec = as_saved(share.spec, "cuda")
    kept = float(layer_activations(spec, share.layers, TokenShare(0, token_parts)))
    if groups := segments(plan.recompute, range(share.layers[0].index, share.layers[-1].index + 1)):
        kept = len(groups) * spec.hidden // token_parts + kept * (1 - sum(map(len, groups)) / len(share.layers))
    way = times.shape.here * kept * times.shape.size / host_rate(cluster)
    forward, backward = sum(s.forward for s in stages), sum(s.backward for s in stages)
    return max(0.0, way - forward) + max(0.0, way - backward)


# The pipeline -------------------------------------------------------------------------------------------------------


def transfers(times: LayerTimes, world: int, pp: int) -> tuple[float, float]:
    """Returns the seconds of a send to the nearest stage, and of one that crosses a border between domains, if the
    pipeline has one."""
    shape, plan, distance, inside = times.shape, times.plan, world // pp, times.network.tiers[0].span
    size = float((shape.outside if plan.sequence else shape.here) * times.model.hidden * shape.size)
    size = times.stack.stage_bytes(size, plan.tp, plan.sequence)
    near = times.network.send(size, distance)
    return near, near if world <= inside else times.network.send(size, max(distance, inside))


def _pipeline(
    stages: Sequence[StageTime],
    owners: Sequence[int],
    states: Sequence[StateTime],
    busy: float,
    times: LayerTimes,
    plan: Plan,
    apart: bool,
    simulate: Simulate,
) -> dict[str, float]:
    """Returns the seconds that the schedule adds to the busiest rank's own time: waiting, and of that what sends
    between stages cost."""
    near, far = transfers(times, plan.world, plan.pp)
    # On average: where a domain holds several stages, some sends cross its border.
    borders = -(-plan.world // times.network.tiers[0].span) - 1
    transfer = near + (far - near) * min(1.0, borders / (plan.pp - 1))
    extra, split = 0.0 if times.stack.overlaps_pipeline else transfer, splits_backward(plan.schedule)
    prices: list[float] = []
    for number, (stage, owner) in enumerate(zip(stages, owners, strict=True)):
        state, weights = states[owner], stage.weights
        ahead, behind = state.each_forward + state.casts_forward, state.each_backward + state.casts_backward
        forward = stage.forward + ahead / plan.virtual_stages + extra * (number < len(stages) - 1)
        inputs = stage.inputs + behind / plan.virtual_stages + extra * (number > 0)
        prices += [forward, inputs + weights, inputs, weights] if split else [forward, inputs + weights, 0.0, 0.0]
    schedule = (plan.schedule, plan.pp, plan.virtual_stages, plan.num_microbatches, tuple(prices))
    total = simulate(*schedule, transfer)
    # Sends of one direction share a link, one after the other; the first leaves when the first stage is through.
    total = max(total, prices[0] + plan.num_microbatches * plan.virtual_stages * far)
    if not apart:
        return {"bubble": max(0.0, total - busy)}
    sent = max(0.0, total - simulate(*schedule, 0.0))
    return {"bubble": max(0.0, total - busy - sent), "pipeline": min(sent, max(0.0, total - busy))}
