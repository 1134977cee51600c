"""The fastest layouts of a space without predicting all of them: best first, by floors. No torch.

A heap holds regions of the space, each with a floor of the step time of everything in it. The lowest is taken out and cut into smaller
regions, until single layouts are left and predicted. A predicted layout that comes out of the heap is the next best one: no region that
is still inside can hold a faster one. So nothing that could win is skipped, and nothing is cut finer than it must be:

    grid -> pace -> states -> saving -> bound of the layout -> memory, then the prediction itself

A region is dropped when its smallest layout does not fit, or when a layout that does less extra work fits already (space.never_faster).
Invariant: the same answer as predicting everything and sorting by `rank_of`, one layout of each family. A test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from shardwise.plan.bounds import Floors
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


@dataclass
class _Cell:
    """Layouts that differ in their savings alone, and which of these fit."""

    grid: Grid
    pace: Pace
    states: States
    fitting: list[Saving] = field(default_factory=list)


class BestFirst:
    """Keeps what it has learnt from one question to the next."""

    def __init__(self, space: Space, limit: int, stack: Stack, floors: Floors | None = None):
        self.space, self.limit, self.stack = space, limit, stack
        self.floors = floors or Floors(space, stack)
        self.counts = Counts()
        self.least: tuple[int, Plan] | None = None  # of what did not fit, the smallest that was counted
        self._memory: dict[Plan, int] = {}
        self._predicted: dict[Plan, Candidate] = {}

    def best(
        self,
        top: int,
        counts: Iterable[int] | None = None,
        accept: Callable[[Grid, Pace | None, States | None, Saving | None], bool] = lambda *region: True,
    ) -> list[Candidate]:
        """At most `top`, best first. `counts`: numbers of GPUs, else all. `accept`: whether a region is asked for, told by its parts so far."""
        heap: list[tuple[Any, ...]] = []
        number = 0

        def push(bound: float, order: tuple[Any, ...], what: object, more: object = None) -> None:
            nonlocal number
            number += 1
            heappush(heap, (bound, order, number, what, more))

        for gpus in self.space.gpu_counts if counts is None else counts:
            push(self.floors.of_gpus(gpus), (), gpus)
        found: list[Candidate] = []
        families: set[tuple[int, ...]] = set()
        while heap and len(found) < top:
            bound, _, _, what, more = heappop(heap)
            if isinstance(what, Candidate):
                if family(what.plan) not in families:
                    families.add(family(what.plan))
                    found.append(what)
            elif isinstance(what, int):
                for grid in self.space.grids(what):
                    self.counts.considered += self.space.size(grid)
                    if accept(grid, None, None, None):
                        push(bound, (), grid)
            elif isinstance(what, Grid):
                self._open_grid(what, bound, push, accept)
            elif isinstance(what, tuple):
                self._open_pace(*what, bound, push, accept, families)
            elif isinstance(what, _Cell):
                grid, pace, states = what.grid, what.pace, what.states
                if (grid.dp, grid.tp, grid.cp, grid.pp, grid.ep, states.zero) in families:
                    continue
                if more is None:
                    self._open_cell(what, bound, push, accept)
                else:
                    self._open_layout(what, more, bound, push)
        return found

    def _open_grid(self, grid: Grid, bound: float, push: Any, accept: Any) -> None:
        each = len(self.space.states(grid)) * len(self.space.savings)
        for pace in self.space.paces(grid):
            if not accept(grid, pace, None, None):
                continue
            if self.floors.least_memory(grid, pace) > self.limit:
                self.counts.too_large += each
            else:
                push(max(bound, self.floors.of_pace(grid, pace)), (), (grid, pace))

    def _open_pace(self, grid: Grid, pace: Pace, bound: float, push: Any, accept: Any, families: Any) -> None:
        for states in self.space.states(grid):
            if not accept(grid, pace, states, None):
                continue
            if (grid.dp, grid.tp, grid.cp, grid.pp, grid.ep, states.zero) in families:
                continue
            if self.floors.least_memory(grid, pace, states) > self.limit:
                self.counts.too_large += len(self.space.savings)
            else:
                push(bound, (), _Cell(grid, pace, states))

    def _open_cell(self, cell: _Cell, bound: float, push: Any, accept: Any) -> None:
        for order, saving in enumerate(self.space.savings):
            if not accept(cell.grid, cell.pace, cell.states, saving):
                continue
            if self.floors.memory(cell.grid, cell.pace, cell.states, saving) > self.limit:
                self.counts.too_large += 1
            else:
                push(bound, (order,), cell, (order, saving, None))

    def _open_layout(self, cell: _Cell, more: Any, bound: float, push: Any) -> None:
        order, saving, plan = more
        if any(never_faster(saving, than=other) for other in cell.fitting):
            return
        if plan is None:
            plan = self.space.plan(cell.grid, cell.pace, cell.states, saving)
            push(max(bound, self.floors.of_plan(plan)), (order,), cell, (order, saving, plan))
            return
        if self.memory_of(plan) > self.limit:
            self.counts.too_large += 1
            return
        cell.fitting.append(saving)
        candidate = self.predicted(plan)
        push(candidate.prediction.step_s, (len(self.space.savings), *plainness(plan)), candidate)

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
