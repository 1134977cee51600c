"""Which ranks of a pipeline may be its slowest, and what a micro-batch passes before it reaches them. No torch.

Counts of layers, from schedules and splits alone. Read next: time_bounds.py, which puts seconds to them.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.plan.layouts.space import Space
from shardwise.plan.remembered import remembered
from shardwise.spec.recompute import segments
from shardwise.spec.schedules import splits_backward, stage_owners


class Turn(NamedTuple):
    """A rank of a pipeline: the layers that a micro-batch passes before it comes here, and the rank's own layers."""

    before: int
    own: tuple[int, ...]
    has_first: bool
    has_last: bool


class Turns:
    """Which pipeline ranks may be the slowest, for each schedule and split; remembered."""

    def __init__(self, space: Space):
        self.space = space

    @remembered
    def of(self, schedule: str, pp: int, virtual_stages: int) -> dict[int, Turn]:
        """Returns the ranks that may be the slowest: of those with most layers the last, and the one with the head."""
        split = self.space.split(pp * virtual_stages)
        assert split is not None, (schedule, pp, virtual_stages)
        owners = stage_owners(schedule, pp, virtual_stages)
        own: list[list[int]] = [[] for _ in range(pp)]
        first = 0
        for owner, number in zip(owners, split, strict=True):
            own[owner] += range(first, first + number)
            first += number
        last = owners[-1]
        most = max(len(own[rank]) for rank in range(pp) if rank != last)
        largest = max(rank for rank in range(pp) if rank != last and len(own[rank]) == most)
        return {rank: Turn(sum(split[:rank]), tuple(own[rank]), rank == 0, rank == last) for rank in (largest, last)}

    @remembered
    def largest(self, pp: int) -> list[tuple[bool, int, int]]:
        """Returns for every schedule whether its backward is split, the layers of its fullest rank and those before it.
        Of both kinds only those that can be quickest are returned."""
        found = set()
        for schedule, virtual_stages in self.space.pipelines(pp):
            for turn in self.of(schedule, pp, virtual_stages).values():
                if not turn.has_last:
                    found.add((splits_backward(schedule), len(turn.own), turn.before))

        def is_beaten(one: tuple[bool, int, int]) -> bool:
            return any(o != one and o[0] == one[0] and o[1] <= one[1] and o[2] <= one[2] for o in found)

        return [one for one in found if not is_beaten(one)]

    @remembered
    def fewest(self, pp: int) -> int:
        """Returns the layers of the fullest rank, under the schedule that gives it the fewest."""
        return min(own for _, own, _ in self.largest(pp))

    def repeated(self, layers: tuple[int, ...], mode: str) -> int:
        """Returns how many of these layers are computed again."""
        return len(self._again(mode).intersection(layers))

    @remembered
    def _again(self, mode: str) -> frozenset[int]:
        return frozenset(index for part in segments(mode, range(self.space.model.num_layers)) for index in part)
