"""Bubble filling: which idle slots of a pipeline step take a forward pass of a held-out micro-batch.

Pure arithmetic on a simulated step. A held-out micro-batch passes all stages within one step, so that it meets one
set of weights; slots before the first stage has had time for it, such as those at the start of the last rank, stay
empty. Its forwards become actions (E) in the ranks' lists. All ranks know the lists beforehand and none decides
anything while a step runs, which is why ranks that must move together (replicas, tensor parallelism) do.

Invariant: the other actions keep their order, and the simulated step is no longer than allowed. Read next:
run/bubble_filling.py, which has measured times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.spec.actions import Action, Actions
from shardwise.spec.timeline import Timeline, simulate


class _Gap(NamedTuple):
    """A stretch of simulated time, in seconds, in which a rank has nothing to do."""

    start: float
    end: float
    before: int  # number of the action that ends it; the length of the list for the gap at the end of a step


class _FilledSlot(NamedTuple):
    """A held-out forward in a gap of a rank."""

    rank: int
    before: int
    start: float
    action: Action


SQUEEZES = (1.0, 0.95, 0.9, 0.85)
"""Factors on the seconds of an E while a slot is looked for."""


def fill_bubbles(
    actions: Actions,
    owners: Sequence[int],
    seconds: Callable[[Action], float],
    most: int,
    delay: float = 0.0,
    longer: float = 1.0,
) -> tuple[Actions, int]:
    """Returns the lists with E between their actions, and how many held-out micro-batches these are: at most `most`.

    `seconds` gives the duration of an action. `delay` is the time in seconds from the end of one E until the next stage
    can begin with it. `longer` is how long the simulated step may become, as a multiple of what it was. An E may also
    go into a gap that is a little too short, as long as the step does not become longer than that."""
    plain = simulate(actions, owners, seconds)
    best, num_best = actions, 0
    for squeeze in SQUEEZES:
        places = _places(plain, owners, seconds, most, delay, squeeze)
        for number in range(len(places), num_best, -1):
            filled = _merged(actions, places[:number])
            if simulate(filled, owners, seconds).total <= longer * plain.total * (1 + 1e-12):
                best, num_best = filled, number
                break
    return best, num_best


def _places(
    plain: Timeline, owners: Sequence[int], seconds: Callable[[Action], float], most: int, delay: float, squeeze: float
) -> list[list[_FilledSlot]]:
    """Returns the slots of each held-out micro-batch that there is room for. Every forward takes the earliest gap that
    it fits into."""
    gaps = [_gaps(plain, rank) for rank in range(len(plain.ranks))]
    places: list[list[_FilledSlot]] = []
    while len(places) < most and (found := _place(gaps, owners, seconds, len(places), delay, squeeze)):
        gaps, chosen = found
        places.append(chosen)
    return places


def _gaps(timeline: Timeline, rank: int) -> list[_Gap]:
    timed = timeline.ranks[rank]
    starts = [*(start for _, start, _ in timed), timeline.total]
    ends = [0.0, *(end for _, _, end in timed)]
    return [_Gap(end, start, number) for number, (end, start) in enumerate(zip(ends, starts, strict=True))]


def _place(
    gaps: list[list[_Gap]],
    owners: Sequence[int],
    seconds: Callable[[Action], float],
    microbatch: int,
    delay: float,
    squeeze: float,
) -> tuple[list[list[_Gap]], list[_FilledSlot]] | None:
    """Places the forwards of one micro-batch, stage by stage; returns the gaps that are left and its slots, or None if
    there is no room."""
    gaps, chosen, ready = [list(mine) for mine in gaps], [], 0.0
    for stage, rank in enumerate(owners):
        action = Action("E", stage, microbatch)
        for number, gap in enumerate(gaps[rank]):
            start = max(gap.start, ready)
            end = start + squeeze * seconds(action)
            if end <= gap.end:
                gaps[rank][number : number + 1] = [gap._replace(end=start), gap._replace(start=end)]
                chosen.append(_FilledSlot(rank, gap.before, start, action))
                ready = end + delay
                break
        else:
            return None
    return gaps, chosen


def _merged(actions: Actions, places: Sequence[Sequence[_FilledSlot]]) -> Actions:
    merged = []
    for rank, mine in enumerate(actions):
        keyed = [(number, 1, 0.0, action) for number, action in enumerate(mine)]  # after every E that goes before it
        keyed += [(at.before, 0, at.start, at.action) for chosen in places for at in chosen if at.rank == rank]
        merged.append(tuple(action for *_, action in sorted(keyed)))
    return tuple(merged)
