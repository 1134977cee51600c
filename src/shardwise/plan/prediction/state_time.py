"""Seconds around the weights: gathering parameters, summing gradients, the optimizer's pass. No torch.

    stage 0   one sum of all gradients per step          stage 1   the same as a scattering sum, and one gathering
    stage 2   a sum per micro-batch                      stage 3   gatherings for each forward and backward as well

as docs/axes/zero.md has it. Collectives run beside computing where the stack lets them: what is counted here is what
remains. Read next: step_time.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.plan.prediction.adapter_share import HeldParameters
from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.collectives import Network
from shardwise.plan.prediction.kernels import Pricer
from shardwise.plan.prediction.layer_time import SLOWED
from shardwise.plan.prediction.rank_share import RankShare
from shardwise.plan.prediction.stack import CAST, Stack
from shardwise.plan.prediction.states import COMPUTE_BYTES, WEIGHT_BYTES, gathered_bytes, gradient_bytes, state_bytes
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan

OPTIMIZER_RATE = measured("optimizer_rate")
MASTER_UPDATE_RATE = measured("master_update_rate")
LOW_BIT_CPU = measured("low_bit_cpu")
LOW_BIT_RATE = measured("low_bit_rate")
NORM_RATE = measured("grad_norm_rate")

BUCKETS = 8
"""Least number of parts in which a sum of gradients travels: the last one begins when backward is over."""

QUANTIZED = {"none": 1, "int8": 1 / 2, "int4": 1 / 4}
"""Bytes on the way over those of bf16."""


class StateTime(NamedTuple):
    each_forward: float = 0.0  # exposed, per micro-batch
    each_backward: float = 0.0
    once: float = 0.0  # per step
    casts_forward: float = 0.0  # passes over memory, per micro-batch
    casts_backward: float = 0.0
    casts_once: float = 0.0


def state_time(
    share: RankShare,
    blocks: Sequence[HeldParameters],
    forward: float,
    backward: float,
    cluster: ClusterSpec,
    network: Network,
    pricer: Pricer,
    plan: Plan,
    stack: Stack,
) -> StateTime:
    """`forward`, `backward`: of all layers of the rank and one micro-batch; collectives can hide behind them."""
    held = sum(blocks[1:], blocks[0])
    compute, weight = COMPUTE_BYTES[plan.precision], WEIGHT_BYTES[plan.precision]
    traffic = stack.traffic(plan, compute, weight)
    casts = _casts(held, plan, stack, pricer)
    if plan.dp * plan.cp == 1:
        return StateTime(casts_forward=casts[0], casts_backward=casts[1], casts_once=casts[2])
    is_frozen = held.trained < share.num_parameters
    experts = 0 if is_frozen else share.spread_parameters
    reduced, gathered_size = traffic.reduce_bytes, traffic.gather_bytes
    gather_all = (gathered_bytes(held, compute) - experts * compute) * gathered_size / compute
    reduce_all = float((held.trained - experts) * reduced)
    gather_all *= QUANTIZED[plan.quantize_weights]
    reduce_all *= QUANTIZED[plan.quantize_gradients] * (2 / reduced if plan.quantize_gradients != "none" else 1.0)
    groups = len(share.layers) + 2
    dp = plan.dp * plan.cp
    shards = plan.shard * plan.cp if plan.zero else dp

    def gathers(inside: int = 0) -> float:
        ranks = min(inside, shards) if inside else shards
        return groups * network.all_gather(gather_all / groups, ranks, plan.tp) + _experts(
            network, experts * gathered_size, plan, groups
        )

    def reductions() -> float:
        if plan.zero == 0:
            parts = max(1, min(BUCKETS, groups))
            one = parts * network.all_reduce(reduce_all / parts, dp, plan.tp)
            return one + network.all_reduce(experts * reduced, plan.expert_copies, plan.ep)
        return groups * network.reduce_scatter(reduce_all / groups, shards, plan.tp) + _experts(
            network, experts * reduced, plan, groups
        )

    between = 0.0
    if plan.zero and plan.replicate > 1:  # the owners of one shard meet once, at the last micro-batch
        between = network.all_reduce(reduce_all / shards, plan.replicate, shards * plan.tp)
    quantising = 0.0
    if plan.quantize_weights != "none":
        quantising += pricer.pass_(held.trained * 3.0)
    if plan.quantize_gradients != "none":
        quantising += pricer.pass_(held.trained * 8.0)
    reduce, gather = reductions(), 0.0 if plan.zero == 0 else gathers()
    if plan.stage.drops_parameters:
        again = gathers(plan.secondary_shard) if plan.secondary_shard else gather
        first, last = gather / groups, reduce / groups
        ahead = _hidden(gather - first, forward, traffic.overlaps_gather) + first
        both = again + reduce  # replicas meet beside the last backward
        behind = _hidden(both, backward, traffic.overlaps_gather and traffic.overlaps_reduce) + last
        once = _hidden(between, max(0.0, backward - both), traffic.overlaps_reduce)
        return StateTime(ahead + quantising, behind + quantising, once, casts[0], casts[1], casts[2])
    tail = reduce / max(groups, BUCKETS)
    opened = _hidden(reduce + between - tail, backward, traffic.overlaps_reduce) + tail
    each = opened + quantising if plan.stage.reduces_every_microbatch else 0.0
    once = 0.0 if each else opened
    if plan.zero:
        first = gather / groups
        once += _hidden(gather - first, forward, traffic.overlaps_gather) + first
    return StateTime(0.0, each, once, casts[0], casts[1], casts[2])


def _hidden(collectives: float, beside: float, overlaps: bool) -> float:
    """What collectives add to a step when computing of this length runs beside them."""
    if not overlaps:
        return collectives
    covered = min(collectives, beside)
    return collectives - covered + SLOWED * covered


def _experts(network: Network, size: float, plan: Plan, groups: int) -> float:
    """Returns the seconds of gathering spread experts, which have fewer replicas, further apart."""
    if not size or plan.expert_shards == 1:
        return 0.0
    return groups * network.all_gather(size / groups, plan.expert_shards, plan.ep)


def _casts(held: HeldParameters, plan: Plan, stack: Stack, pricer: Pricer) -> tuple[float, float, float]:
    """FSDP2's copies: parameters are rounded into a send buffer and copied out of the receive buffer, gradients are
    widened into a buffer and added to what is there. Per forward, per backward, per step. Other frameworks keep a
    16-bit copy, which the optimizer writes, and so do we with `Plan.copies`: then several micro-batches are added up in
    fp32, and that is all."""
    if plan.copies and plan.num_microbatches > 1:
        size = COMPUTE_BYTES[plan.precision] + (2 - 1 / plan.num_microbatches) * WEIGHT_BYTES[plan.precision]
        return 0.0, pricer.pass_(held.trained * size), 0.0
    if not plan.uses_fsdp or not stack.casts_gathered:
        return 0.0, 0.0, 0.0
    weight, compute = WEIGHT_BYTES[plan.precision], COMPUTE_BYTES[plan.precision]
    elements = gathered_bytes(held, compute) / compute
    own = elements / plan.state_shards
    rounding = pricer.pass_(own * (weight + compute)) + pricer.pass_(elements * 2 * compute)
    widening = pricer.pass_(held.trained * (compute + weight) * CAST) + pricer.pass_(
        held.trained / plan.state_shards * 3 * weight
    )
    adding = (
        pricer.pass_(held.trained * 3 * compute)
        if plan.num_microbatches > 1 and not plan.stage.reduces_every_microbatch
        else 0.0
    )
    if plan.stage.drops_parameters:
        return rounding, rounding + widening, 0.0
    if plan.stage.reduces_every_microbatch:
        return 0.0, widening, rounding
    return 0.0, adding, rounding + widening


def optimizer_seconds(trained: float, shards: float, pricer: Pricer, plan: Plan, job: Job, stack: Stack) -> float:
    """Returns the seconds of the norm, clipping and the update of what a rank owns."""
    weight = WEIGHT_BYTES[plan.precision]
    elements = trained / shards
    gradient = gradient_bytes(plan)
    copy = COMPUTE_BYTES[plan.precision] if plan.copies else 0
    moved = 2 * weight + gradient + copy + 2 * state_bytes(job.optimizer, plan.precision)
    is_one_pass = plan.copies and plan.device == "cuda" and job.optimizer == "adamw"  # optim/fused_adamw.py
    update = elements * moved / (MASTER_UPDATE_RATE if is_one_pass else OPTIMIZER_RATE)
    if OPTIMIZERS[job.optimizer].is_low_bit:  # kernels/triton/low_bit_adamw.py
        update = elements * moved / LOW_BIT_RATE if plan.device == "cuda" else LOW_BIT_CPU * update
    update = stack.update_bytes(update, elements)
    norm = elements * gradient / NORM_RATE + (0 if plan.copies else elements * 2 * weight)  # the update itself clips
    return pricer.pass_(update) + pricer.pass_(norm) if elements else 0.0
