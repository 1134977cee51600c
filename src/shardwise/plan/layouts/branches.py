"""How regions of the space are cut into smaller ones, each with a lower bound of its time; what cannot fit is left
out. No torch.

    grid -> size and place -> states and saving -> pace -> one layout

Every cut is made once and kept, so that a further question over the same space walks over what others have cut.
Invariant: a bound is at most the predicted step time of every layout in its region, times its effort; what is left out
is above the limit. Read next: best_first.py, which walks.
"""

from __future__ import annotations

from typing import NamedTuple

from shardwise.plan.layouts.effort import effort, effort_of
from shardwise.plan.layouts.memory_bounds import JUST_BELOW, MemoryBounds
from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.priced import Layouts
from shardwise.plan.layouts.state_bounds import Sharing
from shardwise.plan.layouts.time_bounds import TimeBounds
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import SCHEDULES

Place = tuple[str, bool]
"""Where states wait, and whether activations do."""


class Sized(NamedTuple):
    """Part of a grid."""

    bound: float
    size: int
    place: Place


class Shared(NamedTuple):
    """Part of a size: one kind of states with all kinds of recomputation that may fit."""

    states: States
    sharing: Sharing
    savings: list[tuple[float, int, Saving]]  # bound, plainness; the lowest last


class Branches:
    def __init__(self, layouts: Layouts, limit: int, time: TimeBounds, memory: MemoryBounds):
        self.layouts, self.limit, self.time, self.memory = layouts, limit, time, memory
        space = self.space = layouts.space
        self.counts = layouts.counts
        self.places = list(dict.fromkeys((saving.offload, saving.activation_offload) for saving in space.savings))
        self.order = {saving: place for place, saving in enumerate(space.savings)}
        self._modes = list(dict.fromkeys(saving.recompute for saving in space.savings))
        self._sizes: dict[Grid, list[Sized]] = {}
        self._better: dict[tuple[Grid, int, Place], float] = {}
        self._states: dict[tuple[Grid, int, Place], list[Shared]] = {}
        self._paces: dict[tuple[Grid, int, States, Saving], list[tuple[float, Pace]]] = {}
        self._plans: dict[tuple[Grid, Pace, States, Saving], Plan] = {}
        self._bounds: dict[tuple[Grid, Pace, States, Saving], float] = {}
        self._kept: dict[tuple[Grid, int], list[float]] = {}
        self._least: dict[Grid, States] = {}

    def within(self, limit: int) -> Branches:
        """The same with another limit; what does not depend on it stays."""
        other = Branches(self.layouts, limit, self.time, self.memory)
        other._paces, other._plans, other._bounds = self._paces, self._plans, self._bounds
        other._kept, other._least = self._kept, self._least
        return other

    def least_states(self, grid: Grid) -> States:
        """The highest stage with the most shards holds the least."""
        if grid not in self._least:
            self._least[grid] = max(self.space.states(grid), key=lambda states: (states.zero, -states.replicate))
        return self._least[grid]

    def kept(self, grid: Grid, size: int) -> list[float]:
        """Activations at least, by kind of recomputation."""
        key = (grid, size)
        if key not in self._kept:
            self._kept[key] = [self.memory.kept(grid, size, mode) for mode in self._modes]
        return self._kept[key]

    # Of a grid: sizes of micro-batches and places where states wait ------------------------------------------------

    def sizes(self, grid: Grid) -> list[Sized]:
        found = self._sizes.get(grid)
        if found is None:
            found = self._sizes[grid] = self._cut_grid(grid)
        return found

    def _cut_grid(self, grid: Grid) -> list[Sized]:
        found, least, sizes = [], self.least_states(grid), self.space.sizes(grid)
        each = len(self.space.pipelines(grid.pp)) * len(self.space.states(grid)) * len(self._modes)
        places = [place for place in self.places if self.space.go_together(grid, least, "none", place[1])]
        for size in sizes:
            held, fitting, host = min(self.kept(grid, size)), [], self.space.cluster.host_share
            for place in places:
                weights = self.memory.of_grid(grid, size, least, place[0])
                if weights.beside(0.0 if place[1] else held) <= self.limit and JUST_BELOW * weights.host <= host:
                    fitting.append(place)
            self.counts.too_large += each * (len(places) - len(fitting))
            if fitting:
                bound = self.time.of_size(grid, size)
                found += [Sized(bound * effort_of(grid, *place), size, place) for place in fitting]
        return found

    def size(self, grid: Grid, size: int, place: Place) -> float:
        """A closer lower bound of a size: by the quickest recomputation that the smallest states leave room for."""
        key = (grid, size, place)
        found = self._better.get(key)
        if found is None:
            least = self.least_states(grid)
            weights = self.memory.of_grid(grid, size, least, place[0])
            modes = self._modes
            if not place[1]:
                kept = zip(modes, self.kept(grid, size), strict=True)
                modes = [mode for mode, held in kept if weights.beside(held) <= self.limit]
            sharing = Sharing(0.0, 0.0, 0.0, self.time.sharings.update(grid, size, least, place[0]))
            bounds = [self.time.of_saving(grid, size, Saving(mode, *place), sharing) for mode in modes]
            found = self._better[key] = min(bounds) * effort_of(grid, *place)
        return found

    # Of a size: ZeRO stages and replicas; how much is computed again follows from the memory that they leave

    def states(self, grid: Grid, size: int, place: Place) -> list[Shared]:
        key = (grid, size, place)
        found = self._states.get(key)
        if found is None:
            found = self._states[key] = self._cut_size(grid, size, place)
        return found

    def _cut_size(self, grid: Grid, size: int, place: Place) -> list[Shared]:
        slow, each = effort_of(grid, *place), len(self.space.pipelines(grid.pp))
        modes = []
        for mode, held in zip(self._modes, self.kept(grid, size), strict=True):
            saving, course = Saving(mode, *place), self.time.course(grid, size, mode)
            kept = 0.0 if place[1] else held
            modes.append((kept, self.order[saving], saving, course, self.time.paging(grid, size, saving)))
        least, most = min(mode[0] for mode in modes), max(mode[0] for mode in modes)
        found = []
        for states in self.space.states(grid):
            if not self.space.go_together(grid, states, *place):
                continue
            weights, fitting = self.memory.of_grid(grid, size, states, place[0]), modes
            if weights.beside(least) > self.limit:
                self.counts.too_large += len(modes) * each
                continue
            if weights.beside(most) > self.limit:
                fitting = [mode for mode in modes if weights.beside(mode[0]) <= self.limit]
                self.counts.too_large += (len(modes) - len(fitting)) * each
            sharing = self.time.of_states(grid, size, states, place[0])
            chain = [
                ((course.bound(sharing) + paging) * slow, order, saving) for _, order, saving, course, paging in fitting
            ]
            chain.sort(reverse=True)
            found.append(Shared(states, sharing, chain))
        return found

    # Of states and a saving: schedules -----------------------------------------------------------------------------

    def paces(
        self, grid: Grid, size: int, states: States, saving: Saving, sharing: Sharing
    ) -> list[tuple[float, Pace]]:
        """The quickest last."""
        key = (grid, size, states, saving)
        found = self._paces.get(key)
        if found is None:
            place, courses = saving[1:], self.time.courses(grid, size, saving.recompute)
            slow = {name: effort_of(grid, *place, name) for name in SCHEDULES}
            bounds = [(course.bound(sharing) * slow[pace.schedule], pace) for pace, course in courses.items()]
            found = self._paces[key] = sorted(bounds, reverse=True)
        return found

    # One layout ----------------------------------------------------------------------------------------------------

    def layout(self, grid: Grid, pace: Pace, states: States, saving: Saving) -> tuple[float, Plan] | None:
        """Its lower bound, by a closer look; None if it cannot fit."""
        key = (grid, pace, states, saving)
        plan = self._plans.get(key)
        if plan is None and self.memory.of_layout(*key) <= self.limit:
            plan = self._plans[key] = self.space.plan(*key)
        if plan is None or self.layouts.first_rank(plan) > self.limit:
            self.counts.too_large += 1
            return None
        found = self._bounds.get(key)
        if found is None:
            found = self._bounds[key] = self.time.of_plan(plan) * effort(plan)
        return found, plan
