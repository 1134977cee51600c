"""Computes when each action of a pipeline schedule runs, how long ranks stand idle, how much they hold; and draws it
for terminals.

Pure arithmetic over the lists of `spec/schedules.py` and a price per action. Invariant: a rank does one thing at a
time, in the order of its list; an action starts as soon as its rank is free and what it needs has arrived. Sends
go on beside the computing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import ge
from typing import NamedTuple

from shardwise.spec.actions import Action, in_order, needs, result
from shardwise.spec.schedules import enough_actions

SIGNS = {"F": "0123456789", "B": "abcdefghij", "I": "abcdefghij", "W": "ABCDEFGHIJ", "E": "**********"}
"""The signs that `draw` writes for the last digit of a micro-batch: forward 3, backward (B or I) d, weights D, held-out
forward *."""


class Timed(NamedTuple):
    """An action with its start and its end, in seconds."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each rank runs its actions."""

    ranks: tuple[tuple[Timed, ...], ...]

    @cached_property
    def total(self) -> float:
        """The seconds from the first action to the end of the last."""
        return max((timed[-1].end for timed in self.ranks if timed), default=0.0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """The seconds of work of each rank."""
        return tuple(sum(end - start for _, start, end in timed) for timed in self.ranks)

    @cached_property
    def bubble(self) -> tuple[float, ...]:
        """The seconds of each rank without work, from the first action of any rank to the last."""
        return tuple(self.total - busy for busy in self.busy)

    @cached_property
    def bubble_fraction(self) -> float:
        """The idle share of all ranks' time, 0 to 1."""
        return sum(self.bubble) / (len(self.ranks) * self.total) if self.total else 0.0


def simulate(
    actions: Sequence[Sequence[Action]],
    owners: Sequence[int],
    seconds: Callable[[Action], float],
    transfer: float = 0.0,
) -> Timeline:
    """Returns when each action runs. `seconds` returns how long an action takes, `transfer` is the seconds of a send to
    another rank. Raises AssertionError if the lists deadlock."""
    ends: dict[Action, float] = {}
    ranks: list[list[Timed]] = [[] for _ in actions]
    for rank, action in in_order(actions, len(owners)):
        start = ranks[rank][-1].end if ranks[rank] else 0.0
        for need in needs(action, len(owners)):
            start = max(start, ends[need] + (transfer if owners[need.stage] != rank else 0.0))
        ends[result(action)] = end = start + seconds(action)
        ranks[rank].append(Timed(action, start, end))
    return Timeline(tuple(map(tuple, ranks)))


def peak_in_flight(actions: Sequence[Sequence[Action]]) -> tuple[int, ...]:
    """Returns the most activations that each rank holds at once. One is one stage of one micro-batch, from F until B or
    W."""
    peaks = []
    for mine in actions:
        held = peak = 0
        for action in mine:
            held += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


@lru_cache(8192)
def fullest_moments(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int, rank: int
) -> tuple[tuple[int, ...], ...]:
    """Returns how many activations of each of its stages, in model order, a rank holds at the moments when it may hold
    most: none of the others has as many of every stage."""
    actions = enough_actions(schedule, pp, virtual_stages, num_microbatches)[rank]
    held = dict.fromkeys(sorted({action.stage for action in actions}), 0)
    moments: set[tuple[int, ...]] = set()
    for action, following in zip(actions, (*actions[1:], None), strict=True):
        held[action.stage] += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
        if following is None or following.kind != "F":
            moments.add(tuple(held.values()))
    return tuple(m for m in moments if not any(o != m and all(map(ge, o, m)) for o in moments))


def draw(timeline: Timeline, width: int) -> str:
    """Returns one line per rank, `width` characters for the whole time, each showing what runs in its middle; idle is a
    dot."""
    label = len(str(len(timeline.ranks) - 1))
    lines = []
    for rank, timed in enumerate(timeline.ranks):
        starts = [start for _, start, _ in timed]
        signs = []
        for column in range(width):
            moment = (column + 0.5) * timeline.total / width
            index = bisect_right(starts, moment) - 1
            running = index >= 0 and moment < timed[index].end
            signs.append(SIGNS[timed[index].action.kind][timed[index].action.microbatch % 10] if running else ".")
        lines.append(f"rank {rank:>{label}} |{''.join(signs)}|")
    return "\n".join(lines)
