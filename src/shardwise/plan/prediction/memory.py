"""Memory of every rank along the pipeline at its peak, by what lives there, and with activations as they were measured.
No torch.

Read next: lifetimes.py (which moment is the peak), states.py (weights, gradients, optimizer), activations.py,
rank_share.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwise.plan.prediction.lifetimes import ALLOCATOR_SHARE, APART, activations_of, beside_adapters, rank_memory
from shardwise.plan.prediction.rank_share import RankShare, alike, rank_shares, stages_of
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.states import groups_of, offloaded
from shardwise.plan.resolve.speed import stack_of
from shardwise.spec.job import WHOLE
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import StageMemory
from shardwise.spec.schema import AdapterConfig


def predict_memory(
    spec: ModelSpec, plan: Plan, optimizer: str, adapter: AdapterConfig = WHOLE, stack: Stack | None = None
) -> dict[str, int]:
    """Returns the bytes of the fullest rank at its peak, by category."""
    return fullest(tuple(_may_be_fullest(spec, plan, optimizer, adapter, stack))).parts


def fits(spec: ModelSpec, plan: Plan, optimizer: str, adapter: AdapterConfig, limit: int) -> bool:
    """Returns whether every rank stays within the limit; it ends with the first that does not."""
    return all(stage.peak <= limit for stage in _may_be_fullest(spec, plan, optimizer, adapter, None))


def _may_be_fullest(
    spec: ModelSpec, plan: Plan, optimizer: str, adapter: AdapterConfig, stack: Stack | None
) -> Iterator[StageMemory]:
    """Yields one rank of each kind: of ranks with the same layers, the one with most in flight is the fullest."""
    shares, stack = rank_shares(spec, plan), stack or stack_of(plan)
    by_number = plan.recompute.startswith("every-")  # which layers are computed again depends on where they are
    kinds = range(plan.pp) if by_number else alike(shares)
    fullest_of: dict[tuple[int, ...], RankShare] = {}
    for kind, share in zip(kinds, shares, strict=True):
        key = (kind, share.weights_waiting(plan), *map(len, stages_of(share, plan.split)))
        if fullest_of.setdefault(key, share).in_flight(plan) < share.in_flight(plan):
            fullest_of[key] = share
    for share in fullest_of.values():
        yield rank_memory(share, groups_of(share, spec, adapter), plan, optimizer, stack)


def predict_stages(
    spec: ModelSpec, plan: Plan, optimizer: str, adapter: AdapterConfig = WHOLE, stack: Stack | None = None
) -> tuple[StageMemory, ...]:
    """Returns the memory of each rank along the pipeline; all ranks of one stage hold as much."""
    stack = stack or stack_of(plan)
    return tuple(
        rank_memory(share, groups_of(share, spec, adapter), plan, optimizer, stack) for share in rank_shares(spec, plan)
    )


def fullest(stages: tuple[StageMemory, ...]) -> StageMemory:
    """Returns the memory of the rank that holds most."""
    return max(stages, key=lambda stage: stage.peak)


def predict_elsewhere(spec: ModelSpec, plan: Plan, optimizer: str, adapter: AdapterConfig = WHOLE) -> dict[str, int]:
    """Returns the bytes of the fullest rank that are not on its device: `host`, in CPU memory beside a GPU, offloaded
    states and pinned activations of all micro-batches in flight; `disk`."""
    found = {"host": 0, "disk": 0}
    if plan.offload == "none" and not plan.activation_offload:
        return found
    stack, stays = stack_of(plan), replace(plan, offload="none", offload_to="cpu")
    for share in rank_shares(spec, plan):
        groups, away = groups_of(share, spec, adapter), {"host": 0, "disk": 0}
        if plan.offload != "none":
            away = offloaded(rank_memory(share, groups, stays, optimizer, stack).parts, share, plan)[1]
        if plan.activation_offload:
            away["host"] += activations_of(share, plan, beside_adapters(stack, groups)).away
        found = {name: max(size, away[name]) for name, size in found.items()}
    return found


# With measured activations (run/micro_batch_search.py) ----------------------------------------------------------------


def states_bytes(spec: ModelSpec, plan: Plan, optimizer: str, adapter: AdapterConfig) -> int:
    """Returns the bytes that the fullest rank holds besides activations and temporaries, as predicted."""
    parts = predict_memory(spec, plan, optimizer, adapter)
    return sum(size for name, size in parts.items() if name not in ("activations", "allocator", APART))


def measured_need(spec: ModelSpec, plan: Plan, states: int, activations: int, temporary: int, pp_rank: int) -> int:
    """Returns the bytes of a rank of this pipeline stage that runs `plan`, beside `states`: one micro-batch's
    activations as measured, as often as the schedule holds them, and its temporaries."""
    held = activations * rank_shares(spec, plan)[pp_rank].in_flight(plan) // plan.virtual_stages
    return states + held + max(temporary, int(ALLOCATOR_SHARE[plan.device] * held))
