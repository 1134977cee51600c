"""Lower bounds of step time: what every layout of a region takes at least, computed in microseconds. No torch.

The search looks at millions of layouts and predicts hundreds; lower bounds say which of them can still win. Nothing is
priced here: a bound is the price of a step, asked for the cheapest of what a region leaves open. Layers have their
price (work_bounds.py), sharing the weights and updating them have theirs (state_bounds.py), paging has its own; of a
pipeline only how many layers a rank has and how many come before it is counted (pipeline_bounds.py). Invariant, held by
a test on random layouts and with every price changed: no bound is above the prediction. Read next: memory_bounds.py,
branches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.pipeline_bounds import Turns
from shardwise.plan.layouts.space import Space
from shardwise.plan.layouts.state_bounds import Sharing, Sharings
from shardwise.plan.layouts.work_bounds import FASTEST, SPLIT, Works
from shardwise.plan.prediction.pipeline_time import least_rank_seconds
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.step_time import least_step_seconds, paging_seconds, straggler_share, transfers
from shardwise.plan.remembered import remembered
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import splits_backward

Way = tuple[float, int, bool]
"""Seconds of a rank and of those before it; layers times micro-batches of that rank; whether it is the last, which has
a head to hide collectives behind."""


class Course(NamedTuple):
    """The seconds of a step at least, before anything is counted for its weights."""

    slower: float  # factor on the whole
    mean: float  # the mean rank computes
    path: float  # one micro-batch, through all ranks
    ways: tuple[Way, ...]  # of a pipeline
    pick: Callable[[Iterable[float]], float]  # max: all of these ranks are there; min: one of them, by schedule
    way: float  # what it picks without sharing

    def bound(self, sharing: Sharing) -> float:
        slower, longest, path, ways, pick, way = self
        mean, layer, cast, once = sharing
        if layer and ways:
            way = pick([seconds + number * (cast if is_last else layer) for seconds, number, is_last in ways])
        longest += mean
        if path > longest:
            longest = path
        if way > longest:
            longest = way
        return slower * (longest + once)


def _course(
    slower: float, mean: float, path: float, ways: list[Way], pick: Callable[[Iterable[float]], float]
) -> Course:
    return Course(slower, mean, path, tuple(ways), pick, pick([seconds for seconds, _, _ in ways]))


class TimeBounds:
    """The lower bounds of step time in seconds, by region. `stack`: another framework's; None: ours."""

    def __init__(self, space: Space, stack: Stack | None):
        self.space, self.stack = space, stack
        self.batch = space.job.global_batch
        self.works, self.turns = Works(space, stack), Turns(space)
        self.sharings = Sharings(space, self.works, self.turns)

    @remembered
    def slower(self, gpus: int) -> float:
        return 1 + straggler_share(self.space.cluster, gpus)

    # Of regions ----------------------------------------------------------------------------------------------------

    def of_grid(self, grid: Grid) -> float:
        """Returns the lower bound of the seconds of a step with these degrees."""
        return min(self.of_size(grid, size) for size in self.space.sizes(grid))

    def of_size(self, grid: Grid, size: int) -> float:
        """Returns the same with this size of micro-batch: no rank of a pipeline has less than the mean of the work."""
        count, work = self._count(grid, size), self.works.of(grid, size, "none")
        return self.slower(grid.gpus) * max(work.total * count / grid.pp, work.path)

    def _count(self, grid: Grid, size: int) -> int:
        """Returns the number of micro-batches of a step."""
        return -(-self.batch // (grid.dp * size))

    def of_states(self, grid: Grid, size: int, states: States, offload: str) -> Sharing:
        return self.sharings.of(grid, size, states, offload)

    def of_saving(self, grid: Grid, size: int, saving: Saving, sharing: Sharing) -> float:
        return self.course(grid, size, saving.recompute).bound(sharing) + self.paging(grid, size, saving)

    @remembered
    def course(self, grid: Grid, size: int, mode: str) -> Course:
        """Returns the least course of a step under any schedule."""
        count, work, slower = self._count(grid, size), self.works.of(grid, size, mode), self.slower(grid.gpus)
        if grid.pp == 1:
            return Course(slower, work.total * count, 0.0, (), min, 0.0)
        ways: list[Way] = []
        for is_split, own, before in self.turns.largest(grid.pp):
            mine = self.works.of(grid, size, mode, SPLIT) if is_split else work
            whole = mine.forward + mine.backward
            passed = before * (mine.forward if is_split else whole)
            ways.append((least_rank_seconds(count, own * whole, passed), own * count, False))
        path = max(work.path, count * self._link(grid, size, mode))
        return _course(slower, work.total * count / grid.pp, path, ways, min)

    @remembered
    def courses(self, grid: Grid, size: int, mode: str) -> dict[Pace, Course]:
        """Returns the course of a step by schedule. A rank's first forward comes after those of the ranks before it,
        which have their whole backward still to do after its last, unless they split it."""
        pipelines = self.space.pipelines(grid.pp)
        if grid.pp == 1:
            return {Pace(size, *pipelines[0]): self.course(grid, size, mode)}
        return {Pace(size, *how): self._course_of(grid, size, mode, *how) for how in pipelines}

    def _course_of(self, grid: Grid, size: int, mode: str, schedule: str, virtual_stages: int) -> Course:
        count, is_split = self._count(grid, size), splits_backward(schedule)
        work = self.works.of(grid, size, mode, SPLIT if is_split else FASTEST)
        whole = work.forward + work.backward
        ways = []
        for turn in self.turns.of(schedule, grid.pp, virtual_stages).values():
            own = len(turn.own) * whole + turn.has_first * work.first + turn.has_last * work.last
            if work.more:
                own += work.more * self.turns.repeated(turn.own, mode)
            passed = turn.before * (work.forward if is_split else whole)
            ways.append((least_rank_seconds(count, own, passed), count * len(turn.own), turn.has_last))
        path = work.path if is_split else work.total
        path = max(path, count * virtual_stages * self._link(grid, size, mode))
        return _course(self.slower(grid.gpus), work.total * count / grid.pp, path, ways, max)

    def _link(self, grid: Grid, size: int, mode: str) -> float:
        """Returns the seconds of one send over the slowest link between stages; sends of one direction wait in turn."""
        return transfers(self.works.times(grid, size, mode), grid.gpus, grid.pp)[1]

    def paging(self, grid: Grid, size: int, saving: Saving) -> float:
        """Returns the seconds per step that paging activations takes longer than computing; 0 in a pipeline."""
        if not saving.activation_offload or grid.pp > 1:
            return 0.0
        return self.slower(grid.gpus) * self._paged(grid, size, saving.recompute) * (-(-self.batch // grid.dp) // size)

    @remembered
    def _paged(self, grid: Grid, size: int, mode: str) -> float:
        """Returns the seconds that one micro-batch's activations are on their way longer than it is computed."""
        times, work = self.works.times(grid, size, mode), self.works.of(grid, size, mode)
        plan = replace(times.plan, recompute=mode)
        return paging_seconds(self.sharings.share(plan), [work.whole], self.space.cluster, plan, times)

    # Of one layout -------------------------------------------------------------------------------------------------

    def of_plan(self, plan: Plan) -> float:
        space = self.space
        return least_step_seconds(space.model, space.cluster, space.job, plan, self.stack)
