"""The largest micro-batch that fits, from what micro-batches of one and of two sequences really took on this rank.

Owns the arithmetic; run/micro_batch_search.py sends the two through the engine. Nothing larger is tried: a rank that
ran out of memory would leave the others waiting. Invariant: what is chosen is predicted to need no more than HEADROOM
of the limit, or it is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardwise.plan.prediction.memory import ALLOCATOR_SHARE
from shardwise.plan.prediction.rank_share import rank_shares
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan

HEADROOM = 0.9  # of the limit; the rest is for fragmentation and what torch allocates on the side


@dataclass(frozen=True)
class Taken:
    """Bytes that one micro-batch took at most: what forward keeps for backward, and what came and went beside it."""

    activations: int
    temporary: int


@dataclass(frozen=True)
class Growth:
    """Bytes of a micro-batch of n sequences, as a line through what was measured."""

    one: Taken
    two: Taken | None = None  # without it everything grows with n

    def taken(self, size: int) -> Taken:
        if self.two is None:
            return Taken(size * self.one.activations, size * self.one.temporary)
        return Taken(
            self.one.activations + (size - 1) * max(0, self.two.activations - self.one.activations),
            self.one.temporary + (size - 1) * max(0, self.two.temporary - self.one.temporary),
        )


def needed_bytes(spec: ModelSpec, plan: Plan, states: int, growth: Growth, pp_rank: int) -> int:
    """Of a rank that runs `plan`: its activations as measured, as often as the schedule holds them, beside `states`."""
    taken = growth.taken(plan.micro_batch)
    held = taken.activations * rank_shares(spec, plan)[pp_rank].stages_in_flight // plan.virtual_stages
    return states + held + max(taken.temporary, int(ALLOCATOR_SHARE[plan.device] * held))


def largest_that_fits(
    sizes: Sequence[int],
    spec: ModelSpec,
    plan: Plan,
    states: Callable[[Plan], int],
    growth: Growth,
    pp_rank: int,
    limit: int,
) -> int:
    """The first of `sizes` (largest first) that fits; 1 if none does. `states`: what a rank holds besides
    activations."""
    for size in sizes:
        cut = replace(plan, micro_batch=size)
        if needed_bytes(spec, cut, states(cut), growth, pp_rank) <= HEADROOM * limit:
            return size
    return 1
