"""Floors of step time: what a layout takes at least, told in microseconds. No torch.

The search looks at millions of layouts and predicts hundreds; floors say which of them can still win. Invariant, held by a test on random
layouts: no floor is above the prediction. What is counted is computing and the messages inside of layers, which every micro-batch pays
(least_work.py), what sharing the weights adds (least_sharing.py), and how long a pipeline takes to fill and to empty (turns.py).
Read next: least_memory.py, branches.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.pipeline_bounds import Turns
from shardwise.plan.layouts.space import Space
from shardwise.plan.layouts.state_bounds import Sharing, Sharings
from shardwise.plan.layouts.work_bounds import FASTEST, SPLIT, Works
from shardwise.plan.prediction.activations import layer_activations
from shardwise.plan.prediction.kernels import Pricer
from shardwise.plan.prediction.layer_time import LayerTimes
from shardwise.plan.prediction.offloaded import host_rate
from shardwise.plan.prediction.rank_share import RankShare, cuts_of
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.state_time import StateTime
from shardwise.plan.prediction.step_time import (
    StageTime,
    layer_times,
    rank_state,
    stage_times,
    step_seconds,
    straggler_share,
    transfer_seconds,
    transfers,
)
from shardwise.plan.resolve.speed import stack_of
from shardwise.spec.plan import Plan
from shardwise.spec.recompute import segments
from shardwise.spec.schedules import SCHEDULES, splits_backward, stage_owners
from shardwise.spec.split import tensor_slice

Way = tuple[float, int, bool]
"""Seconds of a rank and of those before it; layers times micro-batches of that rank; whether it is the last, which has a head
to hide messages behind."""


class Course(NamedTuple):
    """Seconds of a step before anything is counted for its weights."""

    slower: float  # factor on the whole
    mean: float  # the mean rank computes
    path: float  # one micro-batch, through all ranks
    ways: tuple[Way, ...]  # of a pipeline
    pick: Callable[[Iterable[float]], float]  # max: all of these ranks are there; min: one of them, by schedule
    way: float  # what it picks without sharing

    def floor(self, sharing: Sharing) -> float:
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


class Staged(NamedTuple):
    """A rank of a pipeline that may be the slowest."""

    stages: list[StageTime]
    busy: float  # seconds of one micro-batch in them
    around: float  # in the ranks before and after it; negative: of the first rank of `zero-bubble`, until its first backward
    hops: int  # messages among these


class _Pipeline(NamedTuple):
    ranks: dict[int, Staged]
    states: dict[tuple[object, ...], StateTime]  # what the ranks send for their weights
    times: LayerTimes  # whose id is in the key: kept, so that it stays its own


class TimeFloors:
    """`stack`: of another framework; None: ours."""

    def __init__(self, space: Space, stack: Stack | None):
        self.space, self.stack = space, stack
        self.batch = space.job.global_batch
        self.works, self.turns = Works(space, stack), Turns(space)
        self.sharings = Sharings(space, self.works, self.turns)
        self._modes: dict[tuple[Grid, int, str], Course] = {}
        self._paces: dict[tuple[Grid, int, str], dict[Pace, Course]] = {}
        self._pipelines: dict[tuple[object, ...], _Pipeline] = {}
        self._states: dict[tuple[object, ...], dict[tuple[object, ...], StateTime]] = {}
        self._slower: dict[int, float] = {}
        self._paged: dict[tuple[object, ...], float] = {}
        self._whole: dict[tuple[int, int], float] = {}

    def slower(self, gpus: int) -> float:
        if gpus not in self._slower:
            self._slower[gpus] = 1 + straggler_share(self.space.cluster, gpus)
        return self._slower[gpus]

    # Of regions ----------------------------------------------------------------------------------------------------

    def of_gpus(self, gpus: int) -> float:
        """All products at the full rate of the device, on all ranks all the time."""
        return self._products / (1 if self.space.device == "cpu" else gpus)

    @cached_property
    def _products(self) -> float:
        space = self.space
        pricer = Pricer(space.cluster.device, space.precision, self.works.stack_for(), space.threads(1))
        rate, best = max(pricer.peak, pricer.exact_peak), pricer.generation
        if not pricer.curves:  # measured rates may be higher than the table's
            rate *= max(
                space.cluster.device.achievable * max(best.sustained, best.in_steps * pricer.chosen),
                *map(max, best.attention.values()),
            )
        share = 1.0 if space.job.adapter.kind == "none" else 1 / 3  # frozen weights have no gradients
        work = self.batch * space.job.seq_len * space.model.flops_per_token(space.job.seq_len) * share
        return work / rate

    def of_size(self, grid: Grid, size: int) -> float:
        """Of a micro-batch's size, whatever the schedule: no rank of a pipeline has less than the mean of the work."""
        rows, work = -(-self.batch // grid.dp), self.works.of(grid, size, "none")
        if grid.pp == 1:
            return self.slower(grid.gpus) * work.total * rows / size
        return self.slower(grid.gpus) * max(work.total * -(-rows // size) / grid.pp, work.path)

    def of_states(self, grid: Grid, size: int, states: States, offload: str) -> Sharing:
        return self.sharings.of(grid, size, states, offload)

    def of_saving(self, grid: Grid, size: int, saving: Saving, sharing: Sharing) -> float:
        return self.course(grid, size, saving.recompute).floor(sharing) + self.paging(grid, size, saving)

    def of_pace(self, grid: Grid, pace: Pace, mode: str, sharing: Sharing) -> float:
        return self.courses(grid, pace.micro_batch, mode)[pace].floor(sharing)

    def course(self, grid: Grid, size: int, mode: str) -> Course:
        """Whatever the schedule."""
        key = (grid, size, mode)
        found = self._modes.get(key)
        if found is None:
            rows, work, slower = -(-self.batch // grid.dp), self.works.of(grid, size, mode), self.slower(grid.gpus)
            if grid.pp == 1:
                found = Course(slower, work.total * rows / size, 0.0, (), min, 0.0)
            else:
                count = -(-rows // size)
                ways: list[Way] = []
                for is_split, own, before in self.turns.largest(grid.pp):
                    mine = self.works.of(grid, size, mode, SPLIT) if is_split else work
                    whole = mine.forward + mine.backward
                    passed = before * (mine.forward if is_split else whole)
                    ways.append((own * count * whole + passed, own * count, False))
                path = max(work.path, count * self._link(grid, size, mode))
                found = _course(slower, work.total * count / grid.pp, path, ways, min)
            self._modes[key] = found
        return found

    def courses(self, grid: Grid, size: int, mode: str) -> dict[Pace, Course]:
        """By schedule. A rank's first forward comes after those of the ranks before it, which have their whole backward still to do after
        its last, unless they split it."""
        key = (grid, size, mode)
        found = self._paces.get(key)
        if found is None:
            if grid.pp == 1:
                found = {Pace(size, *self.space.pipelines(1)[0]): self.course(grid, size, mode)}
            else:
                pipelines = self.space.pipelines(grid.pp)
                found = {Pace(size, *how): self._course_of(grid, size, mode, *how) for how in pipelines}
            self._paces[key] = found
        return found

    def _course_of(self, grid: Grid, size: int, mode: str, schedule: str, virtual_stages: int) -> Course:
        rows, is_split = -(-self.batch // grid.dp), splits_backward(schedule)
        work, count = self.works.of(grid, size, mode, SPLIT if is_split else FASTEST), -(-rows // size)
        whole = work.forward + work.backward
        ways = []
        for turn in self.turns.of(schedule, grid.pp, virtual_stages).values():
            own = len(turn.own) * whole + turn.has_first * work.first + turn.has_last * work.last
            if work.more:
                own += work.more * self.turns.repeated(turn.own, mode)
            seconds = turn.before * (work.forward if is_split else whole) + count * own
            ways.append((seconds, count * len(turn.own), turn.has_last))
        path = work.path if is_split else work.total
        path = max(path, count * virtual_stages * self._link(grid, size, mode))
        return _course(self.slower(grid.gpus), work.total * count / grid.pp, path, ways, max)

    def _link(self, grid: Grid, size: int, mode: str) -> float:
        """Seconds that the slowest link between stages takes for one message: those of one direction wait for each other."""
        return transfers(self.works.times(grid, size, mode), grid.gpus, grid.pp, self.stack or self.works.stack_for())[
            1
        ]

    def paging(self, grid: Grid, size: int, saving: Saving) -> float:
        """Seconds per step that activations take longer to CPU memory and back than computing does (step_time.py); pipelines aside."""
        if not saving.activation_offload or grid.pp > 1:
            return 0.0
        mode, model = saving.recompute, self.space.model
        key = (*grid[1:5], grid.ep, size, mode, grid.gpus == 1)
        if key not in self._paged:
            parts = grid.tp if grid.sequence else 1
            if (grid.tp, parts) not in self._whole:
                spec = replace(tensor_slice(model, grid.tp), norm="layer")
                self._whole[grid.tp, parts] = float(layer_activations(spec, spec.layers, 0, parts))
            kept, times = self._whole[grid.tp, parts], self.works.times(grid, size, mode)
            if groups := segments(mode, range(model.num_layers)):
                kept = len(groups) * model.hidden // parts + kept * (1 - sum(map(len, groups)) / model.num_layers)
            way = times.shape.here * kept * times.shape.size / host_rate(self.space.cluster)
            work = self.works.of(grid, size, mode)
            backward = work.total - work.all_forward
            self._paged[key] = max(0.0, way - work.all_forward) + max(0.0, way - backward)
        rows = -(-self.batch // grid.dp)
        return self.slower(grid.gpus) * self._paged[key] * (rows // size)

    # Of one layout -------------------------------------------------------------------------------------------------

    def of_plan(self, plan: Plan) -> float:
        """With what the ranks of a pipeline send for their weights; instead of the simulation, how long ranks that may be the slowest are
        busy, what they wait for before, and what others do after."""
        space, stack = self.space, self.stack or stack_of(plan)
        if plan.pp == 1:
            return sum(step_seconds(space.model, space.cluster, space.job, plan, stack).values())
        times = layer_times(space.model, space.cluster, space.job, plan, stack)
        transfer = transfer_seconds(times, plan, stack)
        link = transfers(times, plan.world, plan.pp, stack)[1]
        pipeline, once = self._pipeline(plan, times), 0.0
        least = plan.num_microbatches * plan.virtual_stages * link
        for rank, (mine, busy, around, hops) in pipeline.ranks.items():
            state = self._state(pipeline, rank, plan, stack)
            ahead = state.each_forward + state.casts_forward
            busy += ahead + state.each_backward + state.casts_backward
            waits = around + hops * transfer
            if (
                around < 0
            ):  # the first rank of a split backward: until its first one it has nothing but forwards, and room for few
                most = min(self._room(plan), plan.num_microbatches * plan.virtual_stages)
                forward = max(stage.forward for stage in mine) + ahead / plan.virtual_stages
                waits = max(0.0, hops * transfer - around - most * forward)
            least, once = max(least, plan.num_microbatches * busy + waits), max(once, state.once)
        grid = Grid(plan.dp, plan.tp, plan.sequence, plan.cp, plan.cp_kind, plan.pp, plan.ep)
        update = self.sharings.update(grid, plan.micro_batch, States(plan.zero, plan.replicate), plan.offload)
        return self.slower(plan.world) * (least + once + update)

    def _room(self, plan: Plan) -> int:
        """Activations that the first rank of `zero-bubble` may hold (schedules.py)."""
        groups = max(1, plan.num_microbatches // plan.pp)
        return (plan.virtual_stages - 1) * -(-plan.num_microbatches // groups) + plan.pp

    def _state(self, pipeline: _Pipeline, rank: int, plan: Plan, stack: Stack) -> StateTime:
        """Layouts that differ in the schedule alone, or in what they keep elsewhere, share it."""
        key = (rank, plan.dp, plan.zero, plan.replicate, plan.num_microbatches > 1, plan.uses_fsdp)
        found = pipeline.states.get(key)
        if found is None:
            space = self.space
            share, mine = RankShare(cuts_of(space.model, plan)[rank], 1, 0), pipeline.ranks[rank].stages
            found = rank_state(share, space.model, mine, space.cluster, space.job, plan, stack, pipeline.times)
            pipeline.states[key] = found
        return found

    def _pipeline(self, plan: Plan, times: LayerTimes) -> _Pipeline:
        """Of ranks that may be the slowest."""
        key = (id(times), plan.pp, plan.schedule, plan.virtual_stages, plan.recompute)
        found = self._pipelines.get(key)
        if found is None:
            stages, ranks = stage_times(self.space.model, plan, times), {}
            owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages)
            is_split = splits_backward(plan.schedule)

            def add(rank: int, around: float, hops: int) -> None:
                mine = [stage for stage, owner in zip(stages, owners, strict=True) if owner == rank]
                ranks[rank] = Staged(mine, sum(stage.forward + stage.backward for stage in mine), around, hops)

            for rank in self.turns.of(plan.schedule, plan.pp, plan.virtual_stages):
                add(rank, sum(stage.forward + (0.0 if is_split else stage.backward) for stage in stages[:rank]), rank)
            if is_split and not SCHEDULES[plan.schedule].is_v:
                after = stages[len(stages) - plan.pp + 1 :]
                until = sum(stage.forward for stage in stages) + sum(stage.inputs for stage in after)
                add(0, -until, len(stages) - 1 + len(after))
            alike = (id(times), plan.pp, SCHEDULES[plan.schedule].is_v, plan.virtual_stages, plan.recompute)
            found = self._pipelines[key] = _Pipeline(ranks, self._states.setdefault(alike, {}), times)
        return found
