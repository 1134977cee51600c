"""Seconds around the weights: gathering parameters, summing gradients, the optimizer's pass, offloading. No torch.

    stage 0   one sum of all gradients per step          stage 1   the same as a scattering sum, and one gathering
    stage 2   a sum per micro-batch                      stage 3   gatherings for each forward and backward as well

as docs/axes/zero.md has it. Collectives run beside computing where the stack lets them: what is counted here is what
remains. Read next: step_time.py.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.plan.prediction.adapter_share import HeldParameters
from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.collectives import Network
from shardwise.plan.prediction.layer_time import LayerTimes
from shardwise.plan.prediction.rank_share import RankShare
from shardwise.plan.prediction.stack import CAST, Stack
from shardwise.plan.prediction.states import COMPUTE_BYTES, WEIGHT_BYTES, gradient_bytes, groups_of, state_bytes
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan

SLOWED = measured("slowed_by_collectives")
OPTIMIZER_RATE = measured("optimizer_rate")
MASTER_UPDATE_RATE = measured("master_update_rate")
LOW_BIT_CPU = measured("low_bit_cpu")
LOW_BIT_RATE = measured("low_bit_rate")
NORM_RATE = measured("grad_norm_rate")
HOST_LINK = measured("offload_link")
DISK = measured("disk_rate")
CPU_MEMORY = measured("cpu_memory_rate")

BUCKETS = 8
"""Least number of parts in which a sum of gradients travels: the last one begins when backward is over."""

QUANTIZED = {"none": 1, "int8": 1 / 2, "int4": 1 / 4}
"""Bytes on the way over those of bf16."""

TOUCHED = {"optimizer": 36 / 8, "all": 44 / 12}
"""Bytes of CPU memory that are read or written for each byte on the link: Adam's pass over four elements, and both
copies."""


class StateTime(NamedTuple):
    """The seconds that a rank spends on its weights beside computing."""

    each_forward: float = 0.0  # exposed, per micro-batch
    each_backward: float = 0.0
    once: float = 0.0  # per step
    casts_forward: float = 0.0  # passes over memory, per micro-batch
    casts_backward: float = 0.0
    casts_once: float = 0.0


def state_time(
    share: RankShare, forward: float, backward: float, network: Network, times: LayerTimes, plan: Plan
) -> StateTime:
    """Returns the seconds that gathering and summing add to a step. `forward`, `backward`: seconds of all layers of the
    rank and one micro-batch; collectives can hide behind them."""
    held = groups_of(share, times.model, times.adapter).whole
    casts, pricer, dp = _casts(held, times, plan), times.pricer, plan.dp * plan.cp
    if dp == 1:
        return StateTime(0.0, 0.0, 0.0, *casts)
    compute = COMPUTE_BYTES[plan.precision]
    traffic = times.stack.traffic(plan, compute, WEIGHT_BYTES[plan.precision])
    reduced, gathered_size = traffic.reduce_bytes, traffic.gather_bytes
    experts = 0 if held.trained < share.num_parameters else share.spread_parameters
    gather_all = (held.gathered_bytes(compute) - experts * compute) * gathered_size / compute
    gather_all *= QUANTIZED[plan.quantize_weights]
    reduce_all = float((held.trained - experts) * reduced)
    reduce_all *= QUANTIZED[plan.quantize_gradients] * (2 / reduced if plan.quantize_gradients != "none" else 1.0)
    groups, shards = len(share.layers) + 2, plan.shard * plan.cp if plan.zero else dp

    def gathers(ranks: int) -> float:
        rest = groups * network.all_gather(gather_all / groups, ranks, plan.tp)
        return rest + _experts(network, experts * gathered_size, plan, groups)

    if plan.zero:
        reduce = groups * network.reduce_scatter(reduce_all / groups, shards, plan.tp)
        reduce += _experts(network, experts * reduced, plan, groups)
        gather = gathers(shards)
    else:
        parts = min(BUCKETS, groups)
        reduce = parts * network.all_reduce(reduce_all / parts, dp, plan.tp)
        reduce += network.all_reduce(experts * reduced, plan.expert_copies, plan.ep)
        gather = 0.0
    between = 0.0
    if plan.zero and plan.replicate > 1:  # the owners of one shard meet once, at the last micro-batch
        between = network.all_reduce(reduce_all / shards, plan.replicate, shards * plan.tp)
    quantizing = pricer.pass_(held.trained * 3.0) if plan.quantize_weights != "none" else 0.0
    quantizing += pricer.pass_(held.trained * 8.0) if plan.quantize_gradients != "none" else 0.0
    first = gather / groups
    ahead = _hidden(gather - first, forward, traffic.overlaps_gather) + first
    if plan.stage.drops_parameters:
        both = gathers(min(plan.secondary_shard, shards)) if plan.secondary_shard else gather
        both += reduce  # replicas meet beside the last backward
        behind = _hidden(both, backward, traffic.overlaps_gather and traffic.overlaps_reduce) + reduce / groups
        once = _hidden(between, max(0.0, backward - both), traffic.overlaps_reduce)
        return StateTime(ahead + quantizing, behind + quantizing, once, *casts)
    tail = reduce / max(groups, BUCKETS)
    exposed = _hidden(reduce + between - tail, backward, traffic.overlaps_reduce) + tail
    each = exposed + quantizing if plan.stage.reduces_every_microbatch else 0.0
    once = 0.0 if each else exposed
    return StateTime(0.0, each, once + ahead if plan.zero else once, *casts)


def _hidden(collectives: float, beside: float, overlaps: bool) -> float:
    """Returns the seconds that collectives add to a step when computing of this length runs beside them."""
    if not overlaps:
        return collectives
    covered = min(collectives, beside)
    return collectives - covered + SLOWED * covered


def _experts(network: Network, size: float, plan: Plan, groups: int) -> float:
    """Returns the seconds of gathering spread experts, which have fewer replicas, further apart."""
    if not size or plan.expert_shards == 1:
        return 0.0
    return groups * network.all_gather(size / groups, plan.expert_shards, plan.ep)


def _casts(held: HeldParameters, times: LayerTimes, plan: Plan) -> tuple[float, float, float]:
    """Returns the seconds of FSDP2's copies, per forward, per backward, per step: parameters are cast into a send
    buffer and copied out of the receive buffer, gradients are widened into a buffer and added to what is there. Other
    frameworks keep 16-bit weights, which the optimizer writes, and so do we with `Plan.copies`: then several
    micro-batches are added up in fp32, and that is all."""
    weight, compute, several = WEIGHT_BYTES[plan.precision], COMPUTE_BYTES[plan.precision], plan.num_microbatches > 1
    pricer = times.pricer
    if plan.copies and several:
        return 0.0, pricer.pass_(held.trained * (compute + (2 - 1 / plan.num_microbatches) * weight)), 0.0
    if not plan.uses_fsdp or not times.stack.casts_gathered:
        return 0.0, 0.0, 0.0
    elements = held.gathered_bytes(compute) / compute
    casting = pricer.pass_(elements / plan.state_shards * (weight + compute)) + pricer.pass_(elements * 2 * compute)
    widening = pricer.pass_(held.trained * (compute + weight) * CAST)
    widening += pricer.pass_(held.trained / plan.state_shards * 3 * weight)
    if plan.stage.drops_parameters:
        return casting, casting + widening, 0.0
    if plan.stage.reduces_every_microbatch:
        return 0.0, widening, casting
    return 0.0, pricer.pass_(held.trained * 3 * compute) if several else 0.0, casting + widening


def optimizer_passes(elements: float, plan: Plan, optimizer: str, stack: Stack) -> tuple[float, float]:
    """Returns the bytes of the passes over the `elements` parameters that a rank owns: of the update, and of the norm
    with clipping. A pass that runs below the memory's rate is counted longer."""
    weight, gradient = WEIGHT_BYTES[plan.precision], gradient_bytes(plan)
    copy = COMPUTE_BYTES[plan.precision] if plan.copies else 0
    moved = 2 * weight + gradient + copy + 2 * state_bytes(optimizer, plan.precision)
    is_one_pass = plan.copies and plan.device == "cuda" and optimizer == "adamw"  # optim/fused_adamw.py
    update = elements * moved / (MASTER_UPDATE_RATE if is_one_pass else OPTIMIZER_RATE)
    if OPTIMIZERS[optimizer].is_low_bit:  # kernels/triton/low_bit_adamw.py
        update = elements * moved / LOW_BIT_RATE if plan.device == "cuda" else LOW_BIT_CPU * update
    norm = elements * gradient / NORM_RATE + (0 if plan.copies else elements * 2 * weight)  # the update itself clips
    return stack.update_bytes(update, elements), norm


def optimizer_seconds(elements: float, times: LayerTimes, plan: Plan, optimizer: str) -> float:
    """Returns the seconds of the norm, clipping and the update of the parameters that a rank owns."""
    return sum(times.pricer.pass_(size) for size in optimizer_passes(elements, plan, optimizer, times.stack))


# Offloading ---------------------------------------------------------------------------------------------------------


def host_rate(cluster: ClusterSpec) -> float:
    """Returns the bytes per second between one card and CPU memory while all cards of its node do the same."""
    return min(cluster.device.host, CPU_MEMORY / 2 / cluster.per_node)


def offload_seconds(num_parameters: float, plan: Plan, per_node: int) -> float:
    """Returns the seconds that offloading adds to a step of a rank with so many trained parameters (updated by Adam in
    fp32). `optimizer`: gradients down, parameters up. `all`: parameters up for forward and for backward, gradients
    down. A disk: state read and written, with `all` the other two as well. On a CPU only a disk costs anything."""
    if plan.offload == "none":
        return 0.0
    if plan.offload_to == "nvme":
        return num_parameters * (40 if plan.offload == "all" else 16) / DISK
    if plan.device == "cpu":
        return 0.0
    moved = {"optimizer": 8, "all": 12 * plan.num_microbatches}[plan.offload]
    shared = CPU_MEMORY / (min(per_node, plan.world) * TOUCHED[plan.offload])
    return num_parameters * moved / min(HOST_LINK[plan.offload], shared)
