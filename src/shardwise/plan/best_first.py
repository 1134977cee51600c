"""The fastest layouts of a space without predicting all of them: best first, by floors. No torch.

A heap holds regions of the space, each with a floor of the step time of everything in it. The lowest is taken out and cut into smaller
regions, until single layouts are left and predicted. A predicted layout that comes out of the heap is the next best one: no region that
is still inside can hold a faster one. So nothing that could win is skipped, and nothing is cut finer than it must be:

    grid -> pace -> states -> saving -> bound of the layout -> memory, then the prediction itself

A region is dropped when its smallest layout does not fit, or when a layout that does less extra work fits already (space.never_faster).
Invariant: the same answer as predicting everything and sorting by `rank_of`, one layout of each family. A test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from shardwise.plan.bounds import TimeFloors
from shardwise.plan.least_memory import MemoryFloors, Weights
from shardwise.plan.memory import predict_memory
from shardwise.plan.plan import Plan
from shardwise.plan.prediction import Prediction, predict
from shardwise.plan.space import RECOMPUTE, Grid, Pace, Saving, Space, States, never_faster
from shardwise.plan.stack import Stack


@dataclass(frozen=True)
class Candidate:
    """A layout with what is predicted of it."""

    plan: Plan
    prediction: Prediction


@dataclass
class Counts:
    """The work of a search, in layouts."""

    considered: int = 0
    too_large: int = 0  # in regions whose smallest member does not fit
    evaluated: int = 0  # predicted exactly
    seconds: float = 0.0

    @property
    def too_slow(self) -> int:
        """In regions that cannot win a place any more, or whose layouts have a plainer twin that fits."""
        return self.considered - self.too_large - self.evaluated


def rank_of(candidate: Candidate) -> tuple[Any, ...]:
    """Sorts candidates: by time; of equally fast ones fewer GPUs and the plainer layout come first."""
    plan = candidate.plan
    return candidate.prediction.step_s, *plainness(plan)


def plainness(plan: Plan) -> tuple[Any, ...]:
    modes = {mode: place for place, mode in enumerate(RECOMPUTE)}
    return (
        plan.world,
        ("none", "optimizer", "all").index(plan.offload),
        plan.activation_offload,
        modes.get(plan.recompute, len(modes)),
        plan.pp,
        plan.tp,
        plan.cp,
        plan.ep,
        plan.zero,
        -plan.replicate,
        plan.virtual_stages,
        plan.schedule,
        plan.cp_kind,
        not plan.sequence,
        -plan.micro_batch,
    )


def family(plan: Plan) -> tuple[int, ...]:
    """Layouts that differ in less than this are told once, by the best of them."""
    return plan.dp, plan.tp, plan.cp, plan.pp, plan.ep, plan.zero


FEW = 8
"""Grids that are looked at when the smallest layout is asked for."""

Accept = Callable[[Grid, Pace | None, States | None, Saving | None], bool]
"""Whether a region may hold what is asked for, by what is known of it so far."""


def anything(grid: Grid, pace: Pace | None, states: States | None, saving: Saving | None) -> bool:
    return True


@dataclass
class _Question:
    push: Callable[..., None]
    accept: Accept
    families: set[tuple[int, ...]]  # whose best layout was found
    fitting: dict[tuple[Grid, Pace, States], list[Saving]] = field(default_factory=dict)

    def is_told(self, grid: Grid, states: States) -> bool:
        return (grid.dp, grid.tp, grid.cp, grid.pp, grid.ep, states.zero) in self.families


class BestFirst:
    """Keeps what it has learnt from one question to the next."""

    def __init__(self, space: Space, limit: int, stack: Stack):
        self.space, self.limit, self.stack = space, limit, stack
        self.time, self.memory = TimeFloors(space, stack), MemoryFloors(space)
        self.counts = Counts()
        self.least: tuple[int, Plan] | None = None  # of what did not fit, the smallest that was counted
        self._memory: dict[Plan, int] = {}
        self._predicted: dict[Plan, Candidate] = {}
        self._places = list(dict.fromkeys((saving.offload, saving.activation_offload) for saving in space.savings))
        self._order = {saving: place for place, saving in enumerate(space.savings)}
        self._modes = list(dict.fromkeys(saving.recompute for saving in space.savings))

    def best(self, top: int, counts: Iterable[int] | None = None, accept: Accept = anything) -> list[Candidate]:
        """At most `top`, best first. `counts`: numbers of GPUs, else all. `accept`: whether a region may hold what is asked for."""
        heap: list[tuple[Any, ...]] = []
        families: set[tuple[int, ...]] = set()
        found: list[Candidate] = []
        number = 0

        def push(bound: float, order: tuple[Any, ...], opens: Callable[..., Any] | None, *what: Any) -> None:
            nonlocal number
            number += 1
            heappush(heap, (bound, order, number, opens, what))

        for gpus in self.space.gpu_counts if counts is None else counts:
            push(self.time.of_gpus(gpus), (), self._open_gpus, gpus)
        ask = _Question(push, accept, families)
        while heap and len(found) < top:
            bound, _, _, opens, what = heappop(heap)
            if opens is not None:
                opens(ask, bound, *what)
            elif family(what[0].plan) not in families:
                families.add(family(what[0].plan))
                found.append(what[0])
        return found

    # Regions, from large to small ----------------------------------------------------------------------------------

    def _open_gpus(self, ask: _Question, bound: float, gpus: int) -> None:
        for grid in self.space.grids(gpus):
            self.counts.considered += self.space.size(grid)
            if ask.accept(grid, None, None, None):
                ask.push(bound, (), self._open_grid, grid)

    def _open_grid(self, ask: _Question, bound: float, grid: Grid) -> None:
        """Into sizes of micro-batches and places where states wait."""
        each = len(self.space.pipelines(grid.pp)) * len(self.space.states(grid)) * len(self._modes)
        least = self._least_states(grid)
        for place in self._places:
            for size in self.space.sizes(grid.dp):
                if self.memory.of_grid(grid, size, least, *place) > self.limit:
                    self.counts.too_large += each
                else:
                    ask.push(max(bound, self.time.of_size(grid, size)), (), self._open_size, grid, size, place)

    def _open_size(self, ask: _Question, bound: float, grid: Grid, size: int, place: tuple[str, bool]) -> None:
        """Into ZeRO stages and replicas."""
        floor, slower, ways = self.time.of_size(grid, size), self.time.slower, None
        for states in self.space.states(grid):
            if ask.is_told(grid, states) or not ask.accept(grid, None, states, None):
                continue
            if not self.space.go_together(grid, states, place[0]):
                continue
            if self.memory.of_grid(grid, size, states, *place) > self.limit:
                self.counts.too_large += len(self.space.pipelines(grid.pp)) * len(self._modes)
                continue
            if ways is None:
                ways = self._ways(ask, grid, size, place)
            each, once = self.time.of_states(grid, size, states, place[0])
            lowest = max(bound, floor + slower * (each + once))
            ask.push(lowest, (), self._open_states, grid, size, states, place, each, once, ways)

    def _ways(self, ask: _Question, grid: Grid, size: int, place: tuple[str, bool]) -> list[tuple[Any, ...]]:
        """Schedules and what is computed again: floors of time (mean rank, schedule) and of activations."""
        found = []
        for pipeline in self.space.pipelines(grid.pp):
            pace = Pace(size, *pipeline)
            if not ask.accept(grid, pace, None, None):
                continue
            for mode in self._modes:
                saving = Saving(mode, *place)
                if not ask.accept(grid, pace, None, saving):
                    continue
                kept = self.memory.activations(grid, pace, mode, place[1])
                if kept > self.limit:
                    self.counts.too_large += len(self.space.states(grid))
                    continue
                found.append((*self.time.of_pace(grid, pace, mode), kept, self._order[saving], pace, saving))
        return found

    def _open_states(
        self,
        ask: _Question,
        bound: float,
        grid: Grid,
        size: int,
        states: States,
        place: tuple[str, bool],
        each: float,
        once: float,
        ways: list[tuple[Any, ...]],
    ) -> None:
        """Into schedules and what is computed again, the quickest first."""
        if ask.is_told(grid, states):
            return
        several, slower, chain = -(-self.space.job.global_batch // grid.dp) > size, self.time.slower, []
        weights: dict[object, Weights] = {}
        for mean, schedule, kept, order, pace, saving in ways:
            mine = weights.get(pace)
            if mine is None:
                mine = weights[pace] = self.memory.weights(grid, pace, states, place[0])
            if mine.beside(kept, several) > self.limit:
                self.counts.too_large += 1
            elif ask.accept(grid, pace, states, saving):
                chain.append((slower * (max(mean + each, schedule) + once), order, pace, saving))
        chain.sort(reverse=True)
        self._open_next(ask, bound, grid, states, chain)

    def _open_next(
        self, ask: _Question, bound: float, grid: Grid, states: States, chain: list[tuple[Any, ...]]
    ) -> None:
        """One after the other, so that the heap stays small."""
        if ask.is_told(grid, states):
            return
        while chain and chain[-1][0] <= bound:
            floor, _, pace, saving = chain.pop()
            fitting = ask.fitting.setdefault((grid, pace, states), [])
            self._open_saving(ask, max(bound, floor), grid, pace, states, saving, fitting)
        if chain:
            ask.push(chain[-1][0], (-1,), self._open_next, grid, states, chain)

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
        """One layout: a better bound first."""
        if ask.is_told(grid, states) or any(never_faster(saving, than=other) for other in fitting):
            return
        plan = self.space.plan(grid, pace, states, saving)
        floor = max(bound, self.time.of_plan(plan))
        ask.push(floor, (self._order[saving],), self._open_layout, grid, states, saving, plan, fitting)

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
        if ask.is_told(grid, states) or any(never_faster(saving, than=other) for other in fitting):
            return
        if self.memory_of(plan) > self.limit:
            self.counts.too_large += 1
            return
        fitting.append(saving)
        candidate = self.predicted(plan)
        ask.push(candidate.prediction.step_s, (len(self.space.savings), *plainness(plan)), None, candidate)

    def _least_states(self, grid: Grid) -> States:
        """The highest stage with the most shards holds the least."""
        return max(self.space.states(grid), key=lambda states: (states.zero, -states.replicate))

    def within(self, limit: int) -> BestFirst:
        """The same with less memory, and with what was learnt so far."""
        other = copy(self)
        other.limit = limit
        return other

    def smallest(self, counts: Iterable[int], accept: Accept = anything) -> Candidate | None:
        """What needs the least memory, found among the layouts whose floors are lowest."""
        floors = []
        for gpus in counts:
            for grid in self.space.grids(gpus):
                size, states = self.space.sizes(grid.dp)[-1], self._least_states(grid)
                for place in self._places:
                    if accept(grid, None, None, None) and self.space.go_together(grid, states, place[0]):
                        floors.append((self.memory.of_grid(grid, size, states, *place), grid))
        floors.sort(key=lambda entry: (entry[0], entry[1]))
        best: tuple[int, Plan] | None = None
        for grid in list(dict.fromkeys(grid for _, grid in floors))[:FEW]:
            for plan in self._small_plans(grid, accept):
                if best is None or self.memory_of(plan) < best[0]:
                    best = self.memory_of(plan), plan
        return self.predicted(best[1]) if best else None

    def _small_plans(self, grid: Grid, accept: Accept) -> Iterator[Plan]:
        """The least of every axis that is left open: the smallest micro-batch, the most shards, the most moved out."""
        sizes = [
            n
            for n in reversed(self.space.sizes(grid.dp))
            if accept(grid, Pace(n, *self.space.pipelines(grid.pp)[0]), None, None)
        ]
        paces = [
            Pace(size, *how)
            for how in self.space.pipelines(grid.pp)
            for size in self.space.sizes(grid.dp)[-1:] + sizes[:1]
        ]
        every = sorted(self.space.states(grid), key=lambda states: (-states.zero, states.replicate))
        states = [one for one in every if accept(grid, None, one, None)][:1]
        for pace in dict.fromkeys(paces):
            for one in states:
                for saving in self.space.savings:
                    if accept(grid, pace, one, saving) and self.space.go_together(grid, one, saving.offload):
                        yield self.space.plan(grid, pace, one, saving)

    # Single layouts ------------------------------------------------------------------------------------------------

    def memory_of(self, plan: Plan) -> int:
        if plan not in self._memory:
            job = self.space.job
            parts = predict_memory(self.space.model, plan, job.optimizer, job.adapter)
            self._memory[plan] = needed = sum(parts.values())
            if needed > self.limit and (self.least is None or needed < self.least[0]):
                self.least = needed, plan
        return self._memory[plan]

    def predicted(self, plan: Plan) -> Candidate:
        if plan not in self._predicted:
            self.counts.evaluated += 1
            space = self.space
            prediction = predict(space.model, space.cluster, space.job, plan, self.stack)
            self._predicted[plan] = Candidate(plan, prediction)
        return self._predicted[plan]
