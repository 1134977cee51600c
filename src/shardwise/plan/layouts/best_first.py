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
from dataclasses import dataclass, field
from heapq import heappop, heappush
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
    return math.inf


def anything(grid: Grid, pace: Pace | None, states: States | None, saving: Saving | None) -> bool:
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


@dataclass
class _Question:
    push: Callable[..., None]
    accept: Accept
    longest: Longest
    group: Group
    settled: set[Hashable] = field(default_factory=set)  # groups whose best layout was found
    fitting: dict[tuple[Grid, Pace, States], list[Saving]] = field(default_factory=dict)

    def is_settled(self, grid: Grid, states: States) -> bool:
        return self.group(grid, states.zero) in self.settled

    def is_too_slow(self, bound: float, grid: Grid) -> bool:
        """Returns whether no layout is fast enough whose seconds times its effort are at least `bound`."""
        return bound > MOST_EFFORT * self.longest(grid.gpus)


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
        heap: list[tuple[Any, ...]] = []
        found: list[Candidate] = []
        number = 0

        def push(bound: float, order: tuple[Any, ...], opens: Callable[..., Any] | None, *what: Any) -> None:
            nonlocal number
            number += 1
            heappush(heap, (bound, order, number, opens, what))

        ask = _Question(push, accept, longest, group)
        for grid in (grid for gpus in counts or self.space.gpu_counts for grid in self.space.grids(gpus)):
            self.counts.considered += self.space.size(grid)
            if accept(grid, None, None, None):
                push(self.time.of_grid(grid), (), self._open_grid, grid)
        while heap and len(found) < top:
            bound, _, _, opens, what = heappop(heap)
            if opens is not None:
                if not ask.is_too_slow(bound, what[0]):
                    opens(ask, bound, *what)
                continue
            plan = what[0].plan
            if (settled := group(plan, plan.zero)) not in ask.settled:
                ask.settled.add(settled)
                found.append(what[0])
        return found

    # Regions, from large to small ----------------------------------------------------------------------------------

    def _open_grid(self, ask: _Question, bound: float, grid: Grid) -> None:
        for closer, size, place in self.branches.sizes(grid):
            ask.push(max(bound, closer), (), self._open_size, grid, size, place)

    def _open_size(self, ask: _Question, bound: float, grid: Grid, size: int, place: Place) -> None:
        closer = self.branches.size(grid, size, place)
        if closer > bound:  # others may come first
            ask.push(closer, (), self._open_size, grid, size, place)
            return
        for states, sharing, savings in self.branches.states(grid, size, place):
            if not ask.is_settled(grid, states) and ask.accept(grid, None, states, None):
                chain = savings[:]
                if ask.accept is not anything:
                    chain = [one for one in chain if ask.accept(grid, None, states, one[2])]
                self._next_mode(ask, bound, grid, size, states, sharing, chain)

    def _next_mode(
        self, ask: _Question, bound: float, grid: Grid, size: int, states: States, sharing: Sharing, chain: list[Any]
    ) -> None:
        """Pushes one kind of recomputation, which pushes the next when it is opened, so that the heap stays small."""
        if chain and not ask.is_settled(grid, states):
            closer, order, saving = chain.pop()
            ask.push(max(bound, closer), (order,), self._open_mode, grid, size, states, saving, sharing, chain)

    def _open_mode(
        self,
        ask: _Question,
        bound: float,
        grid: Grid,
        size: int,
        states: States,
        saving: Saving,
        sharing: Sharing,
        others: list[Any],
    ) -> None:
        self._next_mode(ask, bound, grid, size, states, sharing, others)
        if not ask.is_settled(grid, states):
            chain = self.branches.paces(grid, size, states, saving, sharing)[:]
            if ask.accept is not anything:
                chain = [one for one in chain if ask.accept(grid, one[1], states, saving)]
            self._open_next(ask, bound, grid, states, saving, chain)

    def _open_next(
        self, ask: _Question, bound: float, grid: Grid, states: States, saving: Saving, chain: list[tuple[float, Pace]]
    ) -> None:
        """Opens the schedules whose lower bound is reached and pushes one more, so that the heap stays small."""
        if ask.is_settled(grid, states):
            return
        while chain and chain[-1][0] <= bound:
            closer, pace = chain.pop()
            fitting = ask.fitting.setdefault((grid, pace, states), [])
            self._open_saving(ask, max(bound, closer), grid, pace, states, saving, fitting)
        if chain:
            ask.push(chain[-1][0], (self.branches.order[saving],), self._open_next, grid, states, saving, chain)

    def _open_saving(
        self,
        ask: _Question,
        bound: float,
        grid: Grid,
        pace: Pace,
        states: States,
        saving: Saving,
        fitting: list[Saving],
    ) -> None:
        """Pushes one layout with a closer lower bound, unless one that does less extra work fits already."""
        if ask.is_settled(grid, states) or any(never_faster(saving, than=other) for other in fitting):
            return
        found = self.branches.layout(grid, pace, states, saving)
        if found is not None:
            closer, plan = found
            order = (self.branches.order[saving],)
            ask.push(max(bound, closer), order, self._open_layout, grid, states, saving, plan, fitting)

    def _open_layout(
        self,
        ask: _Question,
        bound: float,
        grid: Grid,
        states: States,
        saving: Saving,
        plan: Plan,
        fitting: list[Saving],
    ) -> None:
        if ask.is_settled(grid, states) or any(never_faster(saving, than=other) for other in fitting):
            return
        if self.layouts.is_too_large(plan, self.limit):
            self.counts.too_large += 1
            return
        fitting.append(saving)
        closer = self.layouts.seconds(plan) * effort(plan)
        ask.push(max(bound, closer), (self.branches.order[saving],), self._open_fitting, grid, states, plan)

    def _open_fitting(self, ask: _Question, bound: float, grid: Grid, states: States, plan: Plan) -> None:
        """Predicts a layout in all its parts, which takes longer than their sum, and pushes the candidate."""
        if ask.is_settled(grid, states):
            return
        candidate = self.layouts.predicted(plan)
        if candidate.prediction.step_s <= ask.longest(grid.gpus):
            ask.push(rank_of(candidate)[0], (len(self.space.savings), *plainness(plan)), None, candidate)

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
                        least.append((self.memory.of_grid(grid, size, states, place[0]).beside(0.0), grid))
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
        """Yields layouts with the least of all open axes: the smallest micro-batch, most shards, most offload."""
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
        states = [one for one in every if accept(grid, None, one, None)][:1]
        for pace in dict.fromkeys(paces):
            for one in states:
                for saving in self.space.savings:
                    if accept(grid, pace, one, saving) and self.space.go_together(
                        grid, one, saving.offload, saving.activation_offload
                    ):
                        yield self.space.plan(grid, pace, one, saving)
