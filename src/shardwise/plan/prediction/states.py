"""Weights, gradients and optimizer state of a rank: formats, which ZeRO stage keeps what, and what offloading leaves on
the device. Bytes, no torch.

    stage   ours (P parameters, N shards; fp32 weights, Adam)
    0       16 P                            gradients live inside the all-reduce buckets
    1       16 P / N + P gathered           and all of the gradients, when they accumulate over micro-batches
    2       16 P / N + P gathered           every micro-batch's gradients go to their owners at once
    3       16 P / N + two blocks gathered  a tied embedding stays gathered as well

Gathered parameters are in the format of the computation; bf16 over fp32 weights needs them at stage 0 too. On one rank
they may stay (`Plan.copies`): 6 P of weights, 8 P of moments, and gradients of 2 P, or 4 P where micro-batches add
up. What is frozen beside adapters is kept in that format at once, and has neither gradients nor states. Invariant:
where the device is a CPU, nothing leaves its memory but what goes to a disk. Read next: lifetimes.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from shardwise.plan.prediction.adapter_share import HeldParameters, apart_by, held_by
from shardwise.plan.prediction.rank_share import RankShare, numbers_of, stages_of
from shardwise.plan.prediction.stack import Stack
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.precisions import FORMAT_BYTES, PRECISIONS
from shardwise.spec.recompute import segments
from shardwise.spec.schema import AdapterConfig

WEIGHT_BYTES = {name: FORMAT_BYTES[precision.kept] for name, precision in PRECISIONS.items()}
"""Per element of weights, gradients and optimizer state."""

COMPUTE_BYTES = {name: FORMAT_BYTES[precision.computed] for name, precision in PRECISIONS.items()}
"""Per element of activations and of parameters while they are used."""

STATE_BYTES = {name: FORMAT_BYTES[precision.states] for name, precision in PRECISIONS.items()}
"""Per element of optimizer state. Adam's second moment would vanish in fp16."""

LOW_BIT_BYTES = 1 + 4 / 256
"""Per element of 8-bit state: a code, and a block's share of its scale."""


class RankStates(NamedTuple):
    """The bytes that a rank holds of weights, gradients and optimizer state."""

    weights: int
    gathered: int
    gradients: int  # between the last backward and the step
    accumulated: int  # of those, what is there from the first backward on
    optimizer: int
    reduced: int = 0  # at the end of backward: the last group, its gradient and the same in the format of sums
    arriving: int = 0  # gradients that a backward leaves behind before they are added up
    stepping: int = 0  # what the update makes of the gradients


@dataclass(frozen=True)
class Groups:
    """The parameters that each of a rank's blocks holds, and all of them together."""

    blocks: list[HeldParameters]  # the embedding, every layer, the head
    whole: HeldParameters
    largest: int  # trained elements of the largest block
    apart: tuple[str, ...] = ()  # of Stack.side_by_side, what adapters keep from being fused


@lru_cache(4096)
def groups_of(share: RankShare, whole: ModelSpec, adapter: AdapterConfig) -> Groups:
    """Returns the parameters that the share's blocks hold. `whole`: the model that the share is a slice of."""
    blocks = held_by(share, whole, adapter)
    together = sum(blocks, HeldParameters(0, 0))
    return Groups(blocks, together, max(block.trained for block in blocks), apart_by(whole, adapter))


def state_bytes(optimizer: str, precision: str) -> float:
    """Returns the bytes of optimizer state per parameter. With adamw8bit, small and odd tensors keep four times as
    much."""
    size = LOW_BIT_BYTES if OPTIMIZERS[optimizer].is_low_bit else STATE_BYTES[precision]
    return OPTIMIZERS[optimizer].num_states * size


def gradient_bytes(plan: Plan) -> int:
    """Returns the bytes per element of a gradient when the update reads it: beside low-precision weights it is as wide
    as these until several have to be added up."""
    is_narrow = plan.copies and plan.num_microbatches == 1
    return (COMPUTE_BYTES if is_narrow else WEIGHT_BYTES)[plan.precision]


def states_of(share: RankShare, groups: Groups, plan: Plan, optimizer: str, stack: Stack) -> RankStates:
    """Returns the bytes that a rank holds where nothing is offloaded."""
    others = stack.rank_states(share, groups, plan, optimizer)
    if others is not None:
        return others
    weight, compute, whole = WEIGHT_BYTES[plan.precision], COMPUTE_BYTES[plan.precision], groups.whole
    several = plan.num_microbatches > 1
    if plan.copies:  # on one rank: both formats of every trained weight
        gradients = whole.trained * gradient_bytes(plan)
        return RankStates(
            weights=(weight + compute) * whole.trained + compute * whole.frozen + whole.packed_bytes,
            gathered=compute * whole.largest,
            gradients=gradients,
            accumulated=gradients if several else 0,
            optimizer=int(whole.trained * state_bytes(optimizer, plan.precision)),
        )
    is_frozen = whole.trained < share.num_parameters
    spread = share.spread_parameters * (compute if is_frozen else weight)
    full = weight * whole.trained + compute * whole.frozen + whole.packed_bytes
    own = -(-(full - spread) // plan.state_shards) + -(-spread // plan.expert_shards)
    own_trained = -(-weight * whole.trained // plan.state_shards) if is_frozen else own
    gathered, accumulated = whole.gathered_bytes(compute), 0
    uses_ddp = plan.zero == 0 and plan.pp == 1 and plan.dp * plan.cp > 1 and not plan.uses_fsdp
    if not plan.stage.shards_states:
        gathered = compute * whole.trained if compute != weight else 0
        if several and uses_ddp:  # what micro-batches before the last one left, beside the buckets
            accumulated = own_trained
    elif plan.stage.keeps_gradients and several:
        accumulated = weight * whole.trained
    elif plan.stage.drops_parameters:
        gathered = _gathered_at_once(share, groups, plan, stack)
    return RankStates(
        weights=own,
        gathered=gathered + compute * whole.largest,
        gradients=own_trained + accumulated,
        accumulated=own_trained + accumulated if several or plan.pp > 1 or uses_ddp else 0,
        optimizer=int(own_trained / weight * state_bytes(optimizer, plan.precision)),
        reduced=groups.largest * (2 * compute + weight) if plan.uses_fsdp else 0,
        stepping=int(stack.step_bytes * own_trained / weight),
    )


def _gathered_at_once(share: RankShare, groups: Groups, plan: Plan, stack: Stack) -> int:
    """Returns the bytes of the parameters that ZeRO-3 has gathered at most: of two blocks, or of all that are computed
    again together, which stay gathered until their backward."""
    sizes = [block.gathered_bytes(COMPUTE_BYTES[plan.precision]) for block in groups.blocks]
    first, *layers, last = sizes
    stays = first + last if share.spec.tied or stack.ends_stay_gathered else 0
    stages = map(numbers_of, stages_of(share, plan.split))
    together = [len(part) for stage in stages for part in segments(plan.recompute, stage)]
    return stays + sum(sorted(layers if stays else sizes)[-max([2, *together]) :])


# Offloading ---------------------------------------------------------------------------------------------------------

Parts = dict[str, int]


def offloaded(parts: Parts, share: RankShare, plan: Plan) -> tuple[Parts, Parts]:
    """Returns the parts of `parts`, a rank's bytes without offloading, that change, and the bytes that are elsewhere:
    `host` (CPU memory of a GPU's rank) and `disk`."""
    own, state = parts["weights"], parts["optimizer"]
    away, uses_disk = plan.device == "cuda", plan.offload_to == "nvme" and state > 0
    in_memory = min(plan.offload_buffer, state) if uses_disk else state
    here: Parts = {"optimizer": 0 if away else in_memory}
    leaves_at_once = plan.replicate == 1  # what replicas sum, FSDP2 and DDP hold until backward ends
    leaves_early = plan.num_microbatches == 1 and leaves_at_once
    host, disk = 0, state if uses_disk else 0
    if plan.offload == "all":
        here["gathered"] = _two_blocks(share, parts["gathered"] or own * plan.state_shards)
        if uses_disk:
            disk = 2 * own + state
            here["gathered"] += _two_blocks(share, own)  # as they were read
            here["gradients"] = _two_blocks(share, own) if leaves_early else own
            # All weights are in memory once: when the run starts, before they are written.
            rest = sum((parts | here).values()) - own - parts["process"]
            here["weights"] = max(0, own - rest)
        elif away:
            here |= {"weights": 0, "gradients": _two_blocks(share, own) if leaves_at_once else own}
            host = 2 * own + state
    elif away:
        host = in_memory if uses_disk else 2 * own + state  # masters, and gradients as they arrive
        if leaves_early and not uses_disk:
            here["gradients"] = _two_blocks(share, own)
    return here, {"host": host, "disk": disk}


def _two_blocks(share: RankShare, all_bytes: int) -> int:
    """Returns the part of `all_bytes`, those of all parameters of a rank, that its two largest groups take; a tied
    table is one of them, and stays."""
    groups = [*share.layer_parameters, share.embedding, share.head]
    return all_bytes * sum(sorted(groups)[-2:]) // max(1, share.num_parameters)
