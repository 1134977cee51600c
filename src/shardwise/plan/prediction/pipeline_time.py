"""How long a pipeline takes: the schedule that the runtime executes, with a price per stage. No torch.

The same simulation as timeline.py, on numbers instead of actions, because a search asks thousands of times. Invariant:
`pipeline_seconds` is `simulate(...).total` of the same prices (a test compares them); with very many micro-batches the
steady state is drawn out in a line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate

from shardwise.plan.prediction.rank_share import stages_in_flight
from shardwise.spec.schedules import schedule_actions, splits_backward, stage_owners

ENOUGH = 4
"""Times pp: micro-batches that are simulated one by one. After so many, every further group takes as long as the one
before."""

Simulate = Callable[[str, int, int, int, Sequence[float], float], float]
"""Schedule, pp, stages per rank, micro-batches, prices, seconds of a send -> seconds of a step."""

Step = tuple[int, int, int, int, bool, int]
"""rank, price, own result, needed result, whether it comes from another rank, second needed result on the same rank
(-1: none)"""


@lru_cache(maxsize=256)
def _steps(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> tuple[tuple[Step, ...], int]:
    """Actions in an order in which each comes after what it needs. Prices are numbered stage * 4 + kind (F, B, I,
    W)."""
    owners = stage_owners(schedule, pp, virtual_stages)
    stages, count = len(owners), num_microbatches
    orders = schedule_actions(schedule, pp, virtual_stages, count)
    none, backwards = -1, stages * count  # results are numbered: forwards, gradients of inputs, gradients of weights
    done, waiting = bytearray(3 * stages * count), {}  # type: ignore[var-annotated]
    steps: list[Step] = []
    price, add = {"F": 0, "B": 1, "I": 2, "W": 3}, steps.append
    position, awake = [0] * pp, list(range(pp))
    while awake:
        rank = awake.pop()
        order, at = orders[rank], position[rank]
        while at < len(order):
            kind, stage, microbatch = order[at]
            own, far, near, crosses = stage * count + microbatch, none, none, False
            if kind == "F":
                if stage:
                    far, crosses = own - count, owners[stage - 1] != rank
            elif kind == "W":
                far, own = own + backwards, own + 2 * backwards
            else:
                far, own = own, own + backwards
                if stage < stages - 1 and owners[stage + 1] != rank:  # its own forward was before, on this rank
                    far, crosses = own + count, True
                elif stage < stages - 1:
                    near = own + count
            missing = far if far >= 0 and not done[far] else near if near >= 0 and not done[near] else none
            if missing >= 0:
                waiting.setdefault(missing, []).append(rank)
                break
            add((rank, stage * 4 + price[kind], own, far, crosses, near))
            done[own] = 1
            at += 1
            if own in waiting:
                awake += waiting.pop(own)
        position[rank] = at
    assert len(steps) == sum(map(len, orders)), "the schedule's ranks wait for each other"
    return tuple(steps), len(done)


def pipeline_seconds(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int, prices: Sequence[float], transfer: float
) -> float:
    """`prices`: seconds of F, B, I and W of every stage, one after another. `transfer`: of a message between ranks."""
    return _simulated(schedule, pp, virtual_stages, num_microbatches, tuple(prices), transfer)


def least_pipeline_seconds(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int, prices: Sequence[float], transfer: float
) -> float:
    """At most `pipeline_seconds` of the same prices, in a fraction of the time: the longest that any rank takes at
    least."""
    forward, backward, inputs = prices[::4], prices[1::4], prices[2::4]
    owners, is_split = stage_owners(schedule, pp, virtual_stages), splits_backward(schedule)
    busy = [0.0] * pp
    for owner, ahead, behind in zip(owners, forward, backward, strict=True):
        busy[owner] += ahead + behind
    around = (
        forward[:pp] if is_split else [ahead + behind for ahead, behind in zip(forward[:pp], backward, strict=False)]
    )
    hops = 1 if is_split else 2
    longest = 0.0
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
    """Seconds that a rank takes at least: it is busy with every micro-batch, and `around` passes before its first or
    after its last. That is what the stages before its first one take for one micro-batch: their forwards, and where
    backward is not split their backwards too."""
    return num_microbatches * busy + around


@lru_cache(1024)
def _simulated(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int, prices: tuple[float, ...], transfer: float
) -> float:
    few = ENOUGH * pp
    if num_microbatches > few + 2 * pp:
        rest = (num_microbatches - few) // pp * pp
        few = num_microbatches - rest
        first = _run(*_steps(schedule, pp, virtual_stages, few), pp, prices, transfer)
        more = _run(*_steps(schedule, pp, virtual_stages, few + pp), pp, prices, transfer)
        return first + (more - first) * rest / pp
    return _run(*_steps(schedule, pp, virtual_stages, num_microbatches), pp, prices, transfer)


def _run(steps: tuple[Step, ...], slots: int, pp: int, prices: Sequence[float], transfer: float) -> float:
    free, ends = [0.0] * pp, [0.0] * (slots + 1)  # the last one stands for no need
    for rank, price, own, far, crosses, near in steps:
        start = free[rank]
        arrived = ends[far] + transfer if crosses else ends[far]
        if arrived > start:
            start = arrived
        if ends[near] > start:
            start = ends[near]
        free[rank] = ends[own] = start + prices[price]
    return max(free)
