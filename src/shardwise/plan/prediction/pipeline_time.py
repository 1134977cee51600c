"""How long a pipeline takes: the schedule that the runtime executes, with a price per stage. No torch.

The same simulation as timeline.py, on numbers instead of actions, because a search asks thousands of times. Invariant:
`pipeline_seconds` is `simulate(...).total` of the same prices (a test compares them); with very many micro-batches the
steady state is drawn out in a line.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from math import inf
from operator import add

from shardwise.plan.prediction.rank_share import stages_in_flight
from shardwise.spec.schedules import schedule_actions, splits_backward, stage_owners

ENOUGH = 4
"""Times pp: micro-batches that are simulated one by one. After so many, every further group takes as long as the one
before."""

Simulate = Callable[[str, int, int, int, tuple[float, ...], float], float]
"""Schedule, pp, stages per rank, micro-batches, prices, seconds of a send -> seconds of a step."""

Step = tuple[int, int, int, int]
"""rank, price, own result, the result of another rank that it needs (-1: none). What it needs of its own rank stands
before it in that rank's list."""


@lru_cache(maxsize=256)
def _steps(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> tuple[tuple[Step, ...], int]:
    """Returns the actions in an order in which each comes after what it needs, and the number of results. Prices are
    numbered stage * 4 + kind (F, B, I, W)."""
    owners, count = stage_owners(schedule, pp, virtual_stages), num_microbatches
    orders = schedule_actions(schedule, pp, virtual_stages, count)
    backwards = len(owners) * count  # results are numbered: forwards, gradients of inputs, one for all of weights
    done, waiting = bytearray(2 * backwards + 1), {}  # type: ignore[var-annotated]
    steps: list[Step] = []
    price = {"F": 0, "B": 1, "I": 2, "W": 3}
    position, awake = [0] * pp, list(range(pp))
    while awake:
        rank = awake.pop()
        order, at = orders[rank], position[rank]
        while at < len(order):
            kind, stage, microbatch = order[at]
            own, far = stage * count + microbatch, -1
            if kind == "F":
                if stage and owners[stage - 1] != rank:
                    far = own - count
            elif kind == "W":
                own = 2 * backwards
            else:
                own += backwards
                if stage < len(owners) - 1 and owners[stage + 1] != rank:
                    far = own + count
            if far >= 0 and not done[far]:
                waiting.setdefault(far, []).append(rank)
                break
            steps.append((rank, stage * 4 + price[kind], own, far))
            done[own] = 1
            at += 1
            if own in waiting:
                awake += waiting.pop(own)
        position[rank] = at
    assert len(steps) == sum(map(len, orders)), "the schedule's ranks wait for each other"
    return tuple(steps), len(done)


@lru_cache(1024)
def pipeline_seconds(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int, prices: tuple[float, ...], transfer: float
) -> float:
    """Returns the seconds of a step. `prices`: seconds of F, B, I and W of every stage, one after another. `transfer`:
    of a send between ranks."""
    few = ENOUGH * pp
    if num_microbatches > few + 2 * pp:
        rest = (num_microbatches - few) // pp * pp
        few = num_microbatches - rest
        first = _run(*_steps(schedule, pp, virtual_stages, few), pp, prices, transfer)
        more = _run(*_steps(schedule, pp, virtual_stages, few + pp), pp, prices, transfer)
        return first + (more - first) * rest / pp
    return _run(*_steps(schedule, pp, virtual_stages, num_microbatches), pp, prices, transfer)


def least_pipeline_seconds(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int, prices: tuple[float, ...], transfer: float
) -> float:
    """Returns a lower bound of `pipeline_seconds` in a fraction of the time: the most seconds that any rank takes at
    least."""
    forward, backward, inputs = prices[::4], prices[1::4], prices[2::4]
    owners, is_split = stage_owners(schedule, pp, virtual_stages), splits_backward(schedule)
    busy = [0.0] * pp
    for owner, ahead, behind in zip(owners, forward, backward, strict=True):
        busy[owner] += ahead + behind
    around, hops, longest = forward[:pp], 1, 0.0
    if not is_split:
        around, hops = tuple(map(add, around, backward)), 2
    for rank, before in enumerate(accumulate(around[:-1], initial=0.0)):
        longest = max(longest, least_rank_seconds(num_microbatches, busy[rank], before + rank * hops * transfer))
    if is_split and owners[-1] == pp - 1:
        # Until its first backward the first rank has nothing but forwards, and room for few: those of the schedule's
        # limit.
        after = len(owners) - pp + 1
        until = sum(forward) + sum(inputs[after:]) + (len(owners) - 1 + pp - 1) * transfer
        room = stages_in_flight(schedule, pp, virtual_stages, num_microbatches, 0)
        waits = until - room * max(forward[::pp])
        longest = max(longest, least_rank_seconds(num_microbatches, busy[0], max(0.0, waits)))
    return longest


def least_rank_seconds(num_microbatches: int, busy: float, around: float) -> float:
    """Returns the seconds that a rank takes at least: it is busy with every micro-batch, and `around` passes before its
    first or after its last. That is what the stages before its first one take for one micro-batch: their forwards, and
    where backward is not split their backwards too."""
    return num_microbatches * busy + around


def _run(steps: tuple[Step, ...], slots: int, pp: int, prices: tuple[float, ...], transfer: float) -> float:
    """Returns the seconds until the last rank is through."""
    free, ends = [0.0] * pp, [0.0] * slots + [-inf]  # the last one stands for no need
    for rank, price, own, far in steps:
        start, arrived = free[rank], ends[far] + transfer
        if arrived > start:
            start = arrived
        free[rank] = ends[own] = start + prices[price]
    return max(free)
