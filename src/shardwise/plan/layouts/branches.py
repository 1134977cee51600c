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
from shardwise.plan.layouts.memory_bounds import JUST_BELOW, MemoryBounds, Weights
from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.priced import Layouts
from shardwise.plan.layouts.state_bounds import Sharing
from shardwise.plan.layouts.time_bounds import TimeBounds
from shardwise.plan.remembered import remembered
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import SCHEDULES

Place = tuple[str, bool]
"""Where states wait, and whether activations wait in CPU memory."""


class Sized(NamedTuple):
    """The part of a grid with one size of micro-batches and one place for its states."""

    bound: float
    size: int
    place: Place


class Shared(NamedTuple):
    """The part of a size with one kind of states, and all kinds of recomputation that may fit."""

    states: States
    sharing: Sharing
    savings: list[tuple[float, int, Saving]]  # bound, plainness; the lowest last


class Branches:
    """The regions that the search opens one by one, each with its lower bounds of time and memory."""

    def __init__(self, layouts: Layouts, limit: int, time: TimeBounds, memory: MemoryBounds):
        self.layouts, self.limit, self.time, self.memory = layouts, limit, time, memory
        space = self.space = layouts.space
        self.counts = layouts.counts
        self.places = list(dict.fromkeys((saving.offload, saving.activation_offload) for saving in space.savings))
        self.order = {saving: place for place, saving in enumerate(space.savings)}
        self._modes = list(dict.fromkeys(saving.recompute for saving in space.savings))

    def within(self, limit: int) -> Branches:
        """Returns the same branches with another limit in bytes; what does not depend on it is shared."""
        other = Branches(self.layouts, limit, self.time, self.memory)
        other.paces, other.plan, other.bound = self.paces, self.plan, self.bound
        other.kept, other.least_states, other.least_weights = self.kept, self.least_states, self.least_weights
        return other

    @remembered
    def least_states(self, grid: Grid) -> States:
        """Returns the states with the most shards of the highest stage."""
        return max(self.space.states(grid), key=lambda states: (states.zero, -states.replicate))

    @remembered
    def least_weights(self, grid: Grid, size: int, offload: str) -> Weights:
        """Returns the lower bounds of a rank's bytes with any states: shards are the least where there are many, whole
        weights where gathering a few frozen blocks takes more than they do."""
        ends = self.least_states(grid), self.space.states(grid)[0]
        return Weights(*map(min, *(self.memory.of_grid(grid, size, states, offload) for states in ends)))

    @remembered
    def kept(self, grid: Grid, size: int) -> list[float]:
        """Returns the lower bounds of a rank's activations in bytes, by kind of recomputation."""
        return [self.memory.kept(grid, size, mode) for mode in self._modes]

    # Of a grid: sizes of micro-batches and places where states wait ------------------------------------------------

    @remembered
    def sizes(self, grid: Grid) -> list[Sized]:
        found, least, sizes = [], self.least_states(grid), self.space.sizes(grid)
        each = len(self.space.pipelines(grid.pp)) * len(self.space.states(grid)) * len(self._modes)
        places = [place for place in self.places if self.space.go_together(grid, least, "none", place[1])]
        for size in sizes:
            held, fitting, host = min(self.kept(grid, size)), [], self.space.cluster.host_room(grid.gpus)
            for place in places:
                weights = self.least_weights(grid, size, place[0])
                if weights.beside(0.0 if place[1] else held) <= self.limit and JUST_BELOW * weights.host <= host:
                    fitting.append(place)
            self.counts.too_large += each * (len(places) - len(fitting))
            if fitting:
                bound = self.time.of_size(grid, size)
                found += [Sized(bound * effort_of(grid, *place), size, place) for place in fitting]
        return found

    @remembered
    def size(self, grid: Grid, size: int, place: Place) -> float:
        """Returns a closer lower bound of a size, in seconds: by the quickest recomputation that may fit."""
        least, modes = self.least_states(grid), self._modes
        weights = self.least_weights(grid, size, place[0])
        if not place[1]:
            kept = zip(modes, self.kept(grid, size), strict=True)
            modes = [mode for mode, held in kept if weights.beside(held) <= self.limit]
        sharing = Sharing(0.0, 0.0, 0.0, self.time.sharings.update(grid, size, least, place[0]))
        bounds = [self.time.of_saving(grid, size, Saving(mode, *place), sharing) for mode in modes]
        return min(bounds) * effort_of(grid, *place)

    # Of a size: ZeRO stages and replicas; how much is computed again follows from the memory that they leave

    @remembered
    def states(self, grid: Grid, size: int, place: Place) -> list[Shared]:
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

    @remembered
    def paces(
        self, grid: Grid, size: int, states: States, saving: Saving, sharing: Sharing
    ) -> list[tuple[float, Pace]]:
        """Returns the schedules with their lower bounds in seconds, the quickest last."""
        place, courses = saving[1:], self.time.courses(grid, size, saving.recompute)
        slow = {name: effort_of(grid, *place, name) for name in SCHEDULES}
        return sorted([(it.bound(sharing) * slow[pace.schedule], pace) for pace, it in courses.items()], reverse=True)

    # One layout ----------------------------------------------------------------------------------------------------

    def layout(self, grid: Grid, pace: Pace, states: States, saving: Saving) -> tuple[float, Plan] | None:
        """Returns the lower bound of one layout in seconds, and its plan; None if it cannot fit."""
        what = grid, pace, states, saving
        if self.memory.of_layout(*what) > self.limit or self.layouts.first_rank(plan := self.plan(*what)) > self.limit:
            self.counts.too_large += 1
            return None
        return self.bound(plan), plan

    @remembered
    def plan(self, grid: Grid, pace: Pace, states: States, saving: Saving) -> Plan:
        return self.space.plan(grid, pace, states, saving)

    @remembered
    def bound(self, plan: Plan) -> float:
        return self.time.of_plan(plan) * effort(plan)
