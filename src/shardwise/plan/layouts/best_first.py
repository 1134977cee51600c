"""The fastest layouts of a space without predicting all of them: best first, by lower bounds. No torch.

A heap holds regions of the space, each with a lower bound of the step time of everything in it. The lowest is taken out
and cut into smaller regions, until single layouts are left and predicted. A predicted layout that comes out of the heap
is the next best one: no region that is still inside can hold a faster one. So nothing that could win is skipped, and
nothing is cut finer than it must be:

    grid -> size and place -> states and saving -> pace -> bound of the layout -> memory, then the prediction itself

A region is dropped when its smallest layout does not fit, or when a layout that does less extra work fits already
(parts.never_faster). Invariant: the same answer as predicting everything and sorting by `rank_of`, one layout of each
family. A test compares. Read next: branches.py, which cuts; priced.py.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from heapq import heappop, heappush
from itertools import count
from typing import Any

from shardwise.plan.layouts.branches import Branches, Place
from shardwise.plan.layouts.candidate import Candidate, Counts, Group, family, plainness, rank_of
from shardwise.plan.layouts.effort import MOST_EFFORT, effort
from shardwise.plan.layouts.memory_bounds import MemoryBounds
from shardwise.plan.layouts.parts import Grid, Pace, Saving, States, never_faster
from shardwise.plan.layouts.priced import Layouts
from shardwise.plan.layouts.space import Space
from shardwise.plan.layouts.state_bounds import Sharing
from shardwise.plan.layouts.time_bounds import TimeBounds
from shardwise.plan.prediction.stack import Stack
from shardwise.spec.plan import Plan

FEW = 8
"""Grids that are looked at when the smallest layout is asked for."""

Accept = Callable[[Grid, Pace | None, States | None, Saving | None], bool]
"""Whether a region may hold what is asked for, by what is known of it so far."""

Longest = Callable[[int], float]
"""From a number of GPUs to the seconds that a step on them may take."""


def any_length(gpus: int) -> float:
    """Returns infinity: a step may take as many seconds as it likes."""
    return math.inf


def anything(grid: Grid, pace: Pace | None, states: States | None, saving: Saving | None) -> bool:
    """Returns True: whatever a region may hold, it is asked for."""
    return True


@contextmanager
def _uncollected() -> Iterator[None]:
    """Stops the garbage collector. A search makes hundreds of thousands of small tuples, which stay, and no cycles:
    looking for some again and again takes a third of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Walk:
    """One question's way over the branches: its heap of regions, and what has been settled on the way."""

    def __init__(self, branches: Branches, accept: Accept, longest: Longest, group: Group):
        self.branches, self.layouts, self.space = branches, branches.layouts, branches.space
        self.accept, self.longest, self.group = accept, longest, group
        self.heap: list[tuple[Any, ...]] = []
        self.number = count()  # of regions in the order in which they come, which breaks ties
        self.settled: set[Hashable] = set()  # groups whose best layout was found
        self.fitting: dict[tuple[Grid, Pace, States], list[Saving]] = {}

    def best(self, top: int, counts: Iterable[int]) -> list[Candidate]:
        """Returns at most `top` layouts on these numbers of GPUs, best first."""
        found: list[Candidate] = []
        for grid in (grid for gpus in counts for grid in self.space.grids(gpus)):
            self.branches.counts.considered += self.space.size(grid)
            if self.accept(grid, None, None, None):
                self._push(self.branches.time.of_grid(grid), (), self._open_grid, grid)
        while self.heap and len(found) < top:
            bound, _, _, opens, what = heappop(self.heap)
            if opens is not None:
                if bound <= MOST_EFFORT * self.longest(what[0].gpus):  # else no layout in it is fast enough
                    opens(bound, *what)
                continue
            plan = what[0].plan
            if (settled := self.group(plan, plan.zero)) not in self.settled:
                self.settled.add(settled)
                found.append(what[0])
        return found

    def _push(self, bound: float, order: tuple[Any, ...], opens: Callable[..., Any] | None, *what: Any) -> None:
        heappush(self.heap, (bound, order, next(self.number), opens, what))

    def _is_settled(self, grid: Grid, states: States) -> bool:
        return self.group(grid, states.zero) in self.settled

    # Regions, from large to small ----------------------------------------------------------------------------------

    def _open_grid(self, bound: float, grid: Grid) -> None:
        for closer, size, place in self.branches.sizes(grid):
            self._push(max(bound, closer), (), self._open_size, grid, size, place)

    def _open_size(self, bound: float, grid: Grid, size: int, place: Place) -> None:
        closer = self.branches.size(grid, size, place)
        if closer > bound:  # others may come first
            self._push(closer, (), self._open_size, grid, size, place)
            return
        for states, sharing, savings in self.branches.states(grid, size, place):
            if self.accept(grid, None, states, None):
                chain = [one for one in savings if self.accept(grid, None, states, one[2])]
                self._next_mode(bound, grid, size, states, sharing, chain)

    def _next_mode(
        self, bound: float, grid: Grid, size: int, states: States, sharing: Sharing, chain: list[Any]
    ) -> None:
        """Pushes one kind of recomputation, which pushes the next when it is opened, so that the heap stays small."""
        if chain and not self._is_settled(grid, states):
            closer, order, saving = chain.pop()
            self._push(max(bound, closer), (order,), self._open_mode, grid, size, states, saving, sharing, chain)

    def _open_mode(
        self, bound: float, grid: Grid, size: int, states: States, saving: Saving, sharing: Sharing, others: list[Any]
    ) -> None:
        self._next_mode(bound, grid, size, states, sharing, others)
        if not self._is_settled(grid, states):
            paces = self.branches.paces(grid, size, states, saving, sharing)
            chain = [one for one in paces if self.accept(grid, one[1], states, saving)]
            self._open_next(bound, grid, states, saving, chain)

    def _open_next(
        self, bound: float, grid: Grid, states: States, saving: Saving, chain: list[tuple[float, Pace]]
    ) -> None:
        """Opens the schedules whose lower bound is reached and pushes one more, so that the heap stays small."""
        if self._is_settled(grid, states):
            return
        order = (self.branches.order[saving],)
        while chain and chain[-1][0] <= bound:
            closer, pace = chain.pop()
            fitting = self.fitting.setdefault((grid, pace, states), [])
            if not self._is_beaten(grid, states, saving, fitting):
                found = self.branches.layout(grid, pace, states, saving)
                if found is not None:
                    closest = max(bound, closer, found[0])
                    self._push(closest, order, self._open_layout, grid, states, saving, found[1], fitting)
        if chain:
            self._push(chain[-1][0], order, self._open_next, grid, states, saving, chain)

    def _is_beaten(self, grid: Grid, states: States, saving: Saving, fitting: list[Saving]) -> bool:
        """Returns whether nobody asks for a layout any more, or one that does less extra work fits already."""
        return self._is_settled(grid, states) or any(never_faster(saving, than=other) for other in fitting)

    def _open_layout(
        self, bound: float, grid: Grid, states: States, saving: Saving, plan: Plan, fitting: list[Saving]
    ) -> None:
        if self._is_beaten(grid, states, saving, fitting):
            return
        if self.layouts.is_too_large(plan, self.branches.limit):
            self.branches.counts.too_large += 1
            return
        fitting.append(saving)
        closer = self.layouts.seconds(plan) * effort(plan)
        self._push(max(bound, closer), (self.branches.order[saving],), self._open_fitting, grid, states, plan)

    def _open_fitting(self, bound: float, grid: Grid, states: States, plan: Plan) -> None:
        """Predicts a layout in all its parts, which takes longer than their sum, and pushes the candidate."""
        if self._is_settled(grid, states):
            return
        candidate = self.layouts.predicted(plan)
        if candidate.prediction.step_s <= self.longest(grid.gpus):
            self._push(rank_of(candidate)[0], (len(self.space.savings), *plainness(plan)), None, candidate)


class BestFirst:
    """The best-first search over a space. It keeps what it has learnt from one question to the next."""

    def __init__(self, space: Space, limit: int, stack: Stack | None = None):
        self.space, self.limit = space, limit
        self.counts = Counts()
        self.time, self.memory = TimeBounds(space, stack), MemoryBounds(space, stack or space.fastest)
        self.layouts = Layouts(space, stack, self.counts)
        self.branches = Branches(self.layouts, limit, self.time, self.memory)

    def within(self, limit: int) -> BestFirst:
        """Returns the same search with fewer bytes of memory per rank, and with what was learnt so far."""
        other = copy(self)
        other.limit, other.branches = limit, self.branches.within(limit)
        return other

    @_uncollected()
    def best(
        self,
        top: int,
        counts: Iterable[int] | None = None,
        accept: Accept = anything,
        longest: Longest = any_length,
        group: Group = family,
    ) -> list[Candidate]:
        """Returns at most `top` layouts, best first, one of each group. `counts`: numbers of GPUs, else all. `accept`:
        whether a region may hold what is asked for."""
        return _Walk(self.branches, accept, longest, group).best(top, counts or self.space.gpu_counts)

    # When nothing fits ---------------------------------------------------------------------------------------------

    def smallest(self, counts: Iterable[int], accept: Accept = anything) -> Candidate | None:
        """Returns the layout that needs the least memory, found among those with the lowest lower bounds."""
        least = []
        for gpus in counts:
            for grid in self.space.grids(gpus):
                if not accept(grid, None, None, None):
                    continue
                size, states = self.space.sizes(grid)[-1], self.branches.least_states(grid)
                for place in self.branches.places:
                    if self.space.go_together(grid, states, *place):
                        least.append((self.branches.least_weights(grid, size, place[0]).beside(0.0), grid))
        least.sort(key=lambda entry: (entry[0], entry[1]))
        best: tuple[int, Plan] | None = None
        for grid in list(dict.fromkeys(grid for _, grid in least))[:FEW]:
            for plan in self._small_plans(grid, accept):
                if not self.layouts.fits_on_host(plan):
                    continue
                needed = self.layouts.memory_of(plan)
                if best is None or needed < best[0]:
                    best = needed, plan
        return self.layouts.predicted(best[1]) if best else None

    def _small_plans(self, grid: Grid, accept: Accept) -> Iterator[Plan]:
        """Yields layouts with the least of all open axes: smallest micro-batch, most shards or none, most offload."""
        sizes = [
            n
            for n in reversed(self.space.sizes(grid))
            if accept(grid, Pace(n, *self.space.pipelines(grid.pp)[0]), None, None)
        ]
        paces = [
            Pace(size, *how)
            for how in self.space.pipelines(grid.pp)
            for size in self.space.sizes(grid)[-1:] + sizes[:1]
        ]
        every = sorted(self.space.states(grid), key=lambda states: (-states.zero, states.replicate))
        accepted = [one for one in every if accept(grid, None, one, None)]
        states = dict.fromkeys(accepted[:1] + accepted[-1:])
        for pace in dict.fromkeys(paces):
            for one in states:
                for saving in self.space.savings:
                    if accept(grid, pace, one, saving) and self.space.go_together(
                        grid, one, saving.offload, saving.activation_offload
                    ):
                        yield self.space.plan(grid, pace, one, saving)
