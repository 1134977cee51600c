"""Which idle slots of a pipeline step take a forward of something held out.

Pure arithmetic on a simulated step. A held-out micro-batch passes all stages within one step, so that it meets one set of weights;
slots before the first stage has had time for it, such as those at the start of the last rank, stay empty. Its forwards become
actions (E) in the ranks' lists. All ranks know the lists beforehand and nobody decides anything while a step runs, which is why
ranks that must move together (replicas, tensor parallelism) do.

Invariant: the other actions keep their order, and in the simulated step their times. Read next: run/fill.py, which has measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.plan.schedules import Action, Actions
from shardwise.plan.timeline import Timeline, simulate


class _Gap(NamedTuple):
    start: float
    end: float
    before: int  # number of the action that ends it; the length of the list for the gap at the end of a step


def fill_idle(
    actions: Actions, owners: Sequence[int], seconds: Callable[[Action], float], most: int, delay: float = 0.0
) -> tuple[Actions, int]:
    """The lists with E between their actions, and how many micro-batches these are: at most `most`.

    `delay`: seconds from the end of one E until the next stage can begin with it. Every E takes the earliest slot it fits into."""
    gaps = [_gaps(simulate(actions, owners, seconds), rank) for rank in range(len(actions))]
    placed: list[list[tuple[int, float, Action]]] = [[] for _ in actions]
    num_filled = 0
    while num_filled < most and (found := _place(gaps, owners, seconds, num_filled, delay)):
        gaps, chosen = found
        for rank, before, start, action in chosen:
            placed[rank].append((before, start, action))
        num_filled += 1
    return tuple(_merged(mine, sorted(extra)) for mine, extra in zip(actions, placed, strict=True)), num_filled


def _gaps(timeline: Timeline, rank: int) -> list[_Gap]:
    timed = timeline.ranks[rank]
    starts = [*(start for _, start, _ in timed), timeline.total]
    ends = [0.0, *(end for _, _, end in timed)]
    return [_Gap(end, start, number) for number, (end, start) in enumerate(zip(ends, starts, strict=True))]


def _place(
    gaps: list[list[_Gap]], owners: Sequence[int], seconds: Callable[[Action], float], microbatch: int, delay: float
) -> tuple[list[list[_Gap]], list[tuple[int, int, float, Action]]] | None:
    """One micro-batch through all stages: the gaps that are left, and (rank, before, start, action). None if there is no room."""
    gaps, chosen, ready = [list(mine) for mine in gaps], [], 0.0
    for stage, rank in enumerate(owners):
        action = Action("E", stage, microbatch)
        for number, gap in enumerate(gaps[rank]):
            start = max(gap.start, ready)
            end = start + seconds(action)
            if end <= gap.end:
                gaps[rank][number : number + 1] = [gap._replace(end=start), gap._replace(start=end)]
                chosen.append((rank, gap.before, start, action))
                ready = end + delay
                break
        else:
            return None
    return gaps, chosen


def _merged(mine: Sequence[Action], extra: Sequence[tuple[int, float, Action]]) -> tuple[Action, ...]:
    merged: list[Action] = []
    waiting = list(extra)
    for number in range(len(mine) + 1):
        while waiting and waiting[0][0] == number:
            merged.append(waiting.pop(0)[-1])
        merged.extend(mine[number : number + 1])
    return tuple(merged)
