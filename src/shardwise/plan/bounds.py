"""Floors of step time: what a layout takes at least, told in microseconds. No torch.

The search looks at millions of layouts and predicts hundreds; floors say which of them can still win. Invariant, held by a test on random
layouts: no floor is above the prediction. What is counted is computing and the messages inside of layers, which every micro-batch pays,
and how long a pipeline takes to fill and to empty. Read next: least_memory.py, best_first.py.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from shardwise.plan.activations import segments
from shardwise.plan.adapter_share import Held
from shardwise.plan.layer_time import LayerTime, LayerTimes
from shardwise.plan.offloaded import offload_seconds
from shardwise.plan.plan import Plan
from shardwise.plan.rank_share import RankShare, rank_shares
from shardwise.plan.schedules import splits_backward, stage_owners
from shardwise.plan.space import Grid, Pace, Saving, Space, States
from shardwise.plan.stack import Stack
from shardwise.plan.state_time import optimizer_seconds, state_time
from shardwise.plan.states import groups_of
from shardwise.plan.step_time import STRAGGLER, StageTime, layer_times, rank_state, stage_times, step_seconds


class Work(NamedTuple):
    """Seconds of one micro-batch."""

    total: float  # through the whole model, forward and backward
    path: float  # of that, all but the gradients of the weights: what one micro-batch cannot do side by side
    forward: float  # of the quickest layer
    backward: float
    first: float  # embedding
    last: float  # head
    all_forward: float  # of all layers


class Turn(NamedTuple):
    """A rank of a pipeline: layers that a micro-batch passes before it comes here, and layers that it has itself."""

    before: int
    own: int
    has_first: bool
    has_last: bool


class TimeFloors:
    def __init__(self, space: Space, stack: Stack):
        self.space, self.stack = space, stack
        self.seq_len, self.batch = space.job.seq_len, space.job.global_batch
        self.slower = 1 + STRAGGLER * (space.cluster.nodes.bit_length() - 1)
        self._works: dict[tuple[object, ...], Work] = {}
        self._stages: dict[tuple[object, ...], tuple[dict[int, tuple[list[StageTime], float, float]], LayerTimes]] = {}
        self._shares: dict[tuple[int, int], tuple[RankShare, Held]] = {}
        self._turns: dict[tuple[str, int, int], dict[int, Turn]] = {}

    def of_gpus(self, gpus: int) -> float:
        """All products at the full rate of the device, on all ranks all the time."""
        return self._products / (1 if self.space.device == "cpu" else gpus)

    @cached_property
    def _products(self) -> float:
        space = self.space
        rate = max(space.cluster.device.flops.values()) * (space.cluster.world if space.device == "cpu" else 1)
        share = 1.0 if space.job.adapter.kind == "none" else 1 / 3  # frozen weights have no gradients
        return self.batch * self.seq_len * space.model.flops_per_token(self.seq_len) * share / rate

    def of_size(self, grid: Grid, size: int) -> float:
        """Of a micro-batch's size, whatever the schedule: no rank of a pipeline has less than the mean of the work."""
        rows, work = -(-self.batch // grid.dp), self.work(grid, size, "none")
        if grid.pp == 1:
            return self.slower * work.total * rows / size
        return self.slower * max(work.total * -(-rows // size) / grid.pp, work.path)

    def of_states(self, grid: Grid, size: int, states: States, offload: str) -> tuple[float, float]:
        """What sharing or summing the weights adds: per micro-batch and rank, and per step.

        Counted on ranks that have all layers, and divided by the ranks of the pipeline. What is hidden behind computing is a convex
        function of sizes, so the mean over ranks is no less. Nothing computes longer than where all is computed again."""
        space, rows = self.space, -(-self.batch // grid.dp)
        plan = space.plan(grid._replace(pp=1), Pace(size, "1f1b", 1), states, Saving("full", offload, False))
        times = self._times(grid, size, "full")
        share, whole = self._share(plan)
        longest = self.work(grid, size, "full")
        forward, backward = longest.all_forward, longest.total - longest.all_forward
        found = state_time(
            share, [whole], forward, backward, space.cluster, times.network, times.pricer, plan, self.stack
        )
        each = found.each_forward + found.each_backward + found.casts_forward + found.casts_backward
        once = found.once / grid.pp + self._update(share, whole, plan, grid.pp, times)
        return each * -(-rows // size) / grid.pp, once

    def _update(self, share: RankShare, whole: Held, plan: Plan, pp: int, times: LayerTimes) -> float:
        """Seconds of the optimizer on the mean rank."""
        experts = share.spread_parameters if self.space.job.adapter.kind == "none" else 0
        mine = ((whole.trained - experts) / plan.state_shards + experts / plan.expert_shards) / pp
        return optimizer_seconds(mine, 1, times.pricer, plan, self.space.job, self.stack) + offload_seconds(mine, plan)

    def _share(self, plan: Plan) -> tuple[RankShare, Held]:
        """Of a rank that has all layers."""
        key = (plan.tp, plan.ep)
        if key not in self._shares:
            alone = replace(plan, pp=1, schedule="1f1b", virtual_stages=1, split=())
            share = rank_shares(self.space.model, alone)[0]
            whole = groups_of(share.cut, self.space.model, self.space.job.adapter).whole
            self._shares[key] = share, whole
        return self._shares[key]

    def of_pace(self, grid: Grid, pace: Pace, mode: str) -> tuple[float, float]:
        """Two floors: of the mean rank, to which comes what its weights cost; of the schedule."""
        rows = -(-self.batch // grid.dp)
        work = self.work(grid, pace.micro_batch, mode)
        if grid.pp == 1:
            return work.total * rows / pace.micro_batch, 0.0
        count = -(-rows // pace.micro_batch)
        is_split = splits_backward(pace.schedule)
        least = work.path if is_split else work.total
        # A rank's first forward comes after those of the ranks before it, which have their whole backward still to do after its last,
        # unless they split it.
        around = work.forward if is_split else work.forward + work.backward
        one = work.forward + work.backward
        for turn in self.turns(pace.schedule, grid.pp, pace.virtual_stages).values():
            own = turn.own * one + turn.has_first * work.first + turn.has_last * work.last
            least = max(least, turn.before * around + count * own)
        return work.total * count / grid.pp, least

    def of_plan(self, plan: Plan) -> float:
        """With what the ranks of a pipeline send for their weights; instead of the simulation, how long ranks that may be the slowest are
        busy, what they wait for before, and what others do after."""
        space = self.space
        if plan.pp == 1:
            return sum(step_seconds(space.model, space.cluster, space.job, plan, self.stack).values())
        times = layer_times(space.model, space.cluster, space.job, plan, self.stack)
        shares, least, once = rank_shares(space.model, plan), 0.0, 0.0
        for rank, (mine, busy, around) in self._stage_times(plan, times).items():
            state = rank_state(shares[rank], space.model, mine, space.cluster, space.job, plan, self.stack, times)
            busy += state.each_forward + state.each_backward + state.casts_forward + state.casts_backward
            least, once = max(least, plan.num_microbatches * busy + around), max(once, state.once)
        share, whole = self._share(plan)
        return self.slower * (least + once + self._update(share, whole, plan, plan.pp, times))

    def _stage_times(self, plan: Plan, times: LayerTimes) -> dict[int, tuple[list[StageTime], float, float]]:
        """Of ranks that may be the slowest: their stages, seconds of one micro-batch in them, and of the ranks before."""
        key = (id(times), plan.pp, plan.schedule, plan.virtual_stages, plan.recompute)
        if key not in self._stages:
            stages = stage_times(self.space.model, plan, times, self.stack)
            owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages)
            is_split, found = splits_backward(plan.schedule), {}
            for rank in self.turns(plan.schedule, plan.pp, plan.virtual_stages):
                mine = [stage for stage, owner in zip(stages, owners, strict=True) if owner == rank]
                around = sum(stage.forward + (0.0 if is_split else stage.backward) for stage in stages[:rank])
                found[rank] = (mine, sum(stage.forward + stage.backward for stage in mine), around)
            self._stages[key] = (found, times)  # which keeps its id
        return self._stages[key][0]

    def turns(self, schedule: str, pp: int, virtual_stages: int) -> dict[int, Turn]:
        """Of ranks that may be the slowest: the one with most layers, and the last."""
        key = (schedule, pp, virtual_stages)
        if key not in self._turns:
            split = self.space.split(pp * virtual_stages)
            assert split is not None, key
            owners = stage_owners(schedule, pp, virtual_stages)
            own = [0] * pp
            for owner, layers in zip(owners, split, strict=True):
                own[owner] += layers
            last = owners[-1]
            largest = max(rank for rank in range(pp) if own[rank] == max(own))
            found = {largest, last}
            self._turns[key] = {
                rank: Turn(sum(split[:rank]), own[rank], rank == 0, rank == last) for rank in sorted(found)
            }
        return self._turns[key]

    def work(self, grid: Grid, size: int, mode: str) -> Work:
        key = (grid.tp, grid.sequence, grid.cp, grid.cp_kind, grid.ep, size, mode)
        if key not in self._works:
            self._works[key] = self._add_up(grid, size, mode)
        return self._works[key]

    def _add_up(self, grid: Grid, size: int, mode: str) -> Work:
        times = self._times(grid, size, mode)
        found: list[tuple[LayerTime, int]] = []
        for layer, again, count in self._kinds(mode):
            found.append((times.layer(layer, again), count))
        ends = times.ends()
        device = sum(count * _length(one) for one, count in found) + sum(map(_length, ends))
        host = sum(count * (one.host_forward + one.host_backward) for one, count in found)
        return Work(
            total=max(device, host),
            path=device - sum(count * one.weights for one, count in found) - sum(end.weights for end in ends),
            forward=min(_forward(one) for one, _ in found),
            backward=min(_length(one) - _forward(one) for one, _ in found),
            first=_length(ends[0]),
            last=_length(ends[1]),
            all_forward=max(
                sum(count * _forward(one) for one, count in found) + sum(map(_forward, ends)),
                sum(count * one.host_forward for one, count in found),
            ),
        )

    def _kinds(self, mode: str) -> list[tuple]:
        """(a layer, whether it is computed again, how many are like it)"""
        layers = self.space.model.layers
        again = {index for part in segments(mode, range(len(layers))) for index in part}
        counted: dict[object, list] = {}
        for layer in layers:
            key = (layer.window, layer.is_moe, layer.ffn, layer.index in again)
            counted.setdefault(key, [layer, layer.index in again, 0])[2] += 1
        return [tuple(entry) for entry in counted.values()]

    def _times(self, grid: Grid, size: int, mode: str) -> LayerTimes:
        space, dp = self.space, -(-grid.ep // (grid.cp * grid.tp))  # as few as hold all experts
        plan = Plan(
            device=space.device,
            precision=space.precision,
            seq_len=self.seq_len,
            global_batch=size * dp,
            micro_batch=size,
            num_steps=1,
            threads_per_rank=space.threads(grid.gpus),
            reason="one micro-batch",
            dp=dp,
            tp=grid.tp,
            sequence=grid.sequence,
            cp=grid.cp,
            cp_kind=grid.cp_kind,
            ep=grid.ep,
            recompute=mode,
        )
        return layer_times(space.model, space.cluster, space.job, plan, self.stack)


def _forward(time: LayerTime) -> float:
    return time.forward + time.tensor_forward + time.context_forward + time.expert_forward


def _length(time: LayerTime) -> float:
    return (
        _forward(time)
        + (time.inputs + time.weights + time.again)
        + (time.tensor_backward + time.context_backward + time.expert_backward)
    )
