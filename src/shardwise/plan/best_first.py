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

from shardwise.plan.bounds import Sharing, TimeFloors
from shardwise.plan.candidate import Candidate, Counts, family, plainness, rank_of
from shardwise.plan.effort import effort, effort_of
from shardwise.plan.least_memory import MemoryFloors, Weights
from shardwise.plan.lifetimes import rank_memory
from shardwise.plan.memory import WEIGHT_BYTES, predict_elsewhere, predict_memory, state_bytes
from shardwise.plan.plan import Plan
from shardwise.plan.prediction import predict
from shardwise.plan.rank_share import rank_share
from shardwise.plan.space import Grid, Pace, Saving, Space, States, never_faster
from shardwise.plan.speed import stack_of
from shardwise.plan.stack import Stack
from shardwise.plan.states import groups_of

FEW = 8
"""Grids that are looked at when the smallest layout is asked for."""

Place = tuple[str, bool]
"""Where states wait, and whether activations do."""

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

    def __init__(self, space: Space, limit: int, stack: Stack | None = None):
        self.space, self.limit, self.stack = space, limit, stack
        least = stack or space.fastest
        self.time, self.memory = TimeFloors(space, least), MemoryFloors(space, least)
        self.counts = Counts()
        self.least: tuple[int, Plan] | None = None  # of what did not fit, the smallest that was counted
        self._memory: dict[Plan, int] = {}
        self._activations: dict[tuple[Grid, int, str, bool], list[tuple[Pace, float]]] = {}
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
        rows, least = -(-self.space.job.global_batch // grid.dp), self._least_states(grid)
        each = len(self.space.pipelines(grid.pp)) * len(self.space.states(grid)) * len(self._modes)
        for place in self._places:
            if not self.space.go_together(grid, least, "none", place[1]):
                continue
            if place[0] != "none" and self._least_on_host(grid) > self.space.cluster.host_share:
                self.counts.too_large += each * len(self.space.sizes(grid))
                continue
            for size in self.space.sizes(grid):
                weights = self.memory.of_grid(grid, size, least, place[0])
                if weights.beside(self._least_kept(grid, size, place[1]), rows > size) > self.limit:
                    self.counts.too_large += each
                else:
                    floor = self.time.of_size(grid, size) * effort_of(grid, *place)
                    ask.push(max(bound, floor), (), self._open_size, grid, size, place)

    def _open_size(self, ask: _Question, bound: float, grid: Grid, size: int, place: Place) -> None:
        """Into ZeRO stages and replicas. How much is computed again at least follows from the memory that they leave."""
        several = -(-self.space.job.global_batch // grid.dp) > size
        modes = self._modes_of(grid, size, place[1])
        for states in self.space.states(grid):
            if ask.is_told(grid, states) or not ask.accept(grid, None, states, None):
                continue
            if not self.space.go_together(grid, states, *place):
                continue
            weights = self.memory.of_grid(grid, size, states, place[0])
            fitting = [(mean, mode) for mean, kept, mode in modes if weights.beside(kept, several) <= self.limit]
            self.counts.too_large += (len(modes) - len(fitting)) * len(self.space.pipelines(grid.pp))
            if not fitting:
                continue
            sharing, chain = self.time.of_states(grid, size, states, place[0]), []
            for _, mode in fitting:
                saving = Saving(mode, *place)
                if ask.accept(grid, None, states, saving):
                    floor = self.time.of_mode(grid, size, mode, sharing) + self.time.paging(grid, size, saving)
                    chain.append((floor * effort_of(grid, *place), self._order[saving], saving))
            chain.sort(reverse=True)
            self._next_mode(ask, bound, grid, size, states, sharing, chain)

    def _next_mode(
        self, ask: _Question, bound: float, grid: Grid, size: int, states: States, sharing: Sharing, chain: list[Any]
    ) -> None:
        """One kind of recomputation after the other, so that the heap stays small."""
        if chain and not ask.is_told(grid, states):
            floor, order, saving = chain.pop()
            ask.push(max(bound, floor), (order,), self._open_mode, grid, size, states, saving, sharing, chain)

    def _least_kept(self, grid: Grid, size: int, away: bool) -> float:
        return 0.0 if away else min(self.memory.kept(grid, size, mode) for mode in self._modes)

    def _modes_of(self, grid: Grid, size: int, away: bool) -> list[tuple[float, float, str]]:
        """What is computed again: floors of the mean rank's time and of activations, the quickest first."""
        rows = -(-self.space.job.global_batch // grid.dp)
        count = rows / size if grid.pp == 1 else -(-rows // size)
        found = [
            (
                self.time.work(grid, size, mode).total * count / grid.pp,
                0.0 if away else self.memory.kept(grid, size, mode),
                mode,
            )
            for mode in self._modes
        ]
        return sorted(found)

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
        """Into schedules, the quickest first."""
        self._next_mode(ask, bound, grid, size, states, sharing, others)
        if ask.is_told(grid, states):
            return
        several, chain = -(-self.space.job.global_batch // grid.dp) > size, []
        weights: dict[tuple[bool, int], Weights] = {}
        for pace, kept in self._kept_of(grid, size, saving):
            if not ask.accept(grid, pace, states, saving):
                continue
            shape = (pace.schedule == "zbv", pace.virtual_stages)
            if shape not in weights:
                weights[shape] = self.memory.weights(grid, pace, states, saving.offload)
            if weights[shape].beside(kept, several) > self.limit:
                self.counts.too_large += 1
                continue
            floor = self.time.of_pace(grid, pace, saving.recompute, sharing)
            chain.append((floor * effort_of(grid, saving.offload, saving.activation_offload, pace.schedule), pace))
        chain.sort(reverse=True)
        self._open_next(ask, bound, grid, states, saving, chain)

    def _kept_of(self, grid: Grid, size: int, saving: Saving) -> list[tuple[Pace, float]]:
        """Floors of activations by schedule."""
        key = (grid, size, saving.recompute, saving.activation_offload)
        if key not in self._activations:
            paces = (Pace(size, *pipeline) for pipeline in self.space.pipelines(grid.pp))
            self._activations[key] = [(pace, self.memory.activations(grid, pace, *key[2:])) for pace in paces]
        return self._activations[key]

    def _open_next(
        self, ask: _Question, bound: float, grid: Grid, states: States, saving: Saving, chain: list[tuple[float, Pace]]
    ) -> None:
        """One after the other, so that the heap stays small."""
        if ask.is_told(grid, states):
            return
        while chain and chain[-1][0] <= bound:
            floor, pace = chain.pop()
            fitting = ask.fitting.setdefault((grid, pace, states), [])
            self._open_saving(ask, max(bound, floor), grid, pace, states, saving, fitting)
        if chain:
            ask.push(chain[-1][0], (self._order[saving],), self._open_next, grid, states, saving, chain)

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
        floor = max(bound, self.time.of_plan(plan) * effort(plan))
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
        if self._is_too_large(plan):
            self.counts.too_large += 1
            return
        fitting.append(saving)
        candidate = self.predicted(plan)
        ask.push(rank_of(candidate)[0], (len(self.space.savings), *plainness(plan)), None, candidate)

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
                size, states = self.space.sizes(grid)[-1], self._least_states(grid)
                for place in self._places:
                    if accept(grid, None, None, None) and self.space.go_together(grid, states, *place):
                        floors.append((self.memory.of_grid(grid, size, states, place[0]).beside(0.0, True), grid))
        floors.sort(key=lambda entry: (entry[0], entry[1]))
        best: tuple[int, Plan] | None = None
        for grid in list(dict.fromkeys(grid for _, grid in floors))[:FEW]:
            for plan in self._small_plans(grid, accept):
                if not self._fits_on_host(plan):
                    continue
                if best is None or self.memory_of(plan) < best[0]:
                    best = self.memory_of(plan), plan
        return self.predicted(best[1]) if best else None

    def _small_plans(self, grid: Grid, accept: Accept) -> Iterator[Plan]:
        """The least of every axis that is left open: the smallest micro-batch, the most shards, the most moved out."""
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

    # Single layouts ------------------------------------------------------------------------------------------------

    def _is_too_large(self, plan: Plan) -> bool:
        """One rank is enough to know it, and the first is most often the fullest."""
        if plan.pp > 1 and plan not in self._memory:
            job, share = self.space.job, rank_share(self.space.model, plan, 0)
            groups = groups_of(share.cut, self.space.model, job.adapter)
            if rank_memory(share, groups, plan, job.optimizer, self.stack or stack_of(plan)).peak > self.limit:
                return True
        return self.memory_of(plan) > self.limit or not self._fits_on_host(plan)

    def _least_on_host(self, grid: Grid) -> float:
        """Masters, gradients and optimizer state, shared out over all ranks."""
        job, precision = self.space.job, self.space.precision
        if job.adapter.kind != "none" or self.space.device == "cpu":
            return 0.0
        each = 2 * WEIGHT_BYTES[precision] + state_bytes(job.optimizer, precision)
        return 0.99 * each * self.space.model.num_parameters / grid.gpus

    def _fits_on_host(self, plan: Plan) -> bool:
        """What is offloaded must find room beside the devices."""
        if plan.offload == "none" or plan.device == "cpu":
            return True
        job = self.space.job
        away = predict_elsewhere(self.space.model, plan, job.optimizer, job.adapter)
        return away["host"] <= self.space.cluster.host_share

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
