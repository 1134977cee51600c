"""Floors of step time: what a layout takes at least, told in microseconds. No torch.

The search looks at millions of layouts and predicts hundreds; floors say which of them can still win. Invariant, held by a test on random
layouts: no floor is above the prediction. What is counted is computing and the messages inside of layers, which every micro-batch pays,
and how long a pipeline takes to fill and to empty. Read next: least_memory.py, best_first.py.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from shardwise.plan.activations import layer_activations, segments
from shardwise.plan.adapter_share import Held
from shardwise.plan.kernels import Pricer
from shardwise.plan.layer_time import LayerTime, LayerTimes
from shardwise.plan.offloaded import host_rate, offload_seconds
from shardwise.plan.plan import Plan
from shardwise.plan.rank_share import RankShare, cuts_of, rank_shares, tensor_slice
from shardwise.plan.schedules import splits_backward, stage_owners
from shardwise.plan.space import Grid, Pace, Saving, Space, States
from shardwise.plan.stack import Stack
from shardwise.plan.state_time import optimizer_seconds, state_time
from shardwise.plan.states import groups_of
from shardwise.plan.step_time import (
    StageTime,
    layer_times,
    rank_state,
    stage_times,
    step_seconds,
    straggler_share,
    transfer_seconds,
)


class Work(NamedTuple):
    """Seconds of one micro-batch."""

    total: float  # through the whole model, forward and backward
    path: float  # of that, all but the gradients of the weights: what one micro-batch cannot do side by side
    forward: float  # of the quickest layer
    backward: float
    more: float  # of a layer that is computed again, where others are not
    first: float  # embedding
    last: float  # head
    all_forward: float  # of all layers


class Turn(NamedTuple):
    """A rank of a pipeline: layers that a micro-batch passes before it comes here, and layers that it has itself."""

    before: int
    own: tuple[int, ...]
    has_first: bool
    has_last: bool


class Sharing(NamedTuple):
    """What sharing the weights out or summing their gradients adds."""

    mean: float  # seconds per step of the mean rank
    layer: float  # or: seconds per micro-batch and layer, where a rank has layers alone and all are alike
    once: float  # seconds per step


NOTHING = Sharing(0.0, 0.0, 0.0)


class TimeFloors:
    def __init__(self, space: Space, stack: Stack):
        self.space, self.stack = space, stack
        self.seq_len, self.batch = space.job.seq_len, space.job.global_batch
        self._works: dict[tuple[object, ...], Work] = {}
        self._stages: dict[
            tuple[object, ...], tuple[dict[int, tuple[list[StageTime], float, float, int]], LayerTimes]
        ] = {}
        self._shares: dict[tuple[int, int, bool], tuple[RankShare, Held]] = {}
        self._larger: dict[int, list[tuple[bool, int, int]]] = {}
        self._messages: dict[tuple[object, ...], tuple[float, float]] = {}
        self._updates: dict[tuple[object, ...], float] = {}
        self._slower: dict[int, float] = {}
        self._paged: dict[tuple[object, ...], float] = {}
        self._again: dict[str, frozenset[int]] = {}
        self._turns: dict[tuple[str, int, int], dict[int, Turn]] = {}

    def slower(self, gpus: int) -> float:
        if gpus not in self._slower:
            self._slower[gpus] = 1 + straggler_share(self.space.cluster, gpus)
        return self._slower[gpus]

    def of_gpus(self, gpus: int) -> float:
        """All products at the full rate of the device, on all ranks all the time."""
        return self._products / (1 if self.space.device == "cpu" else gpus)

    @cached_property
    def _products(self) -> float:
        space = self.space
        pricer = Pricer(space.cluster.device, space.precision, self.stack, space.threads(1))
        rate, best = max(pricer.peak, pricer.exact_peak), pricer.generation
        if not pricer.curves:  # measured rates may be higher than the table's
            rate *= max(space.cluster.device.achievable * best.sustained, *map(max, best.attention.values()))
        share = 1.0 if space.job.adapter.kind == "none" else 1 / 3  # frozen weights have no gradients
        work = self.batch * self.seq_len * space.model.flops_per_token(self.seq_len) * share
        return work / rate

    def of_size(self, grid: Grid, size: int) -> float:
        """Of a micro-batch's size, whatever the schedule: no rank of a pipeline has less than the mean of the work."""
        rows, work = -(-self.batch // grid.dp), self.work(grid, size, "none")
        if grid.pp == 1:
            return self.slower(grid.gpus) * work.total * rows / size
        return self.slower(grid.gpus) * max(work.total * -(-rows // size) / grid.pp, work.path)

    def of_states(self, grid: Grid, size: int, states: States, offload: str) -> Sharing:
        """Without a pipeline as it is predicted. With one: of its layers alone, in equal parts; or, where layers differ, of all ranks
        together. What is hidden behind computing is a convex function of sizes, so the mean over ranks is no less. Nothing computes longer
        than where all is computed again."""
        pp, by_layer = grid.pp, grid.pp > 1 and self._alike
        rows = -(-self.batch // grid.dp)
        # Replicas of shards meet once more: not counted, so that all of them have one price.
        dp = grid.dp // states.replicate if states.zero and grid.ep == 1 else grid.dp
        key = (
            *grid[1:5],
            grid.ep,
            size,
            states.zero,
            dp,
            rows > size,
            by_layer,
            grid.gpus == 1,
            grid.ep > 1 and states.replicate,
        )
        if key not in self._messages:
            self._messages[key] = self._sharing(grid, size, states, dp, by_layer)
        each, once = self._messages[key]
        update = self._update(grid, size, states, offload)
        if by_layer:
            most, number = min(own for _, own, _ in self._largest(pp)), self.space.model.num_layers
            return Sharing(0.0, each / number, once * most / number + update)
        return Sharing(each * -(-rows // size) / pp, 0.0, once / pp + update)

    def _sharing(self, grid: Grid, size: int, states: States, dp: int, by_layer: bool) -> tuple[float, float]:
        """Seconds per micro-batch and per step, on ranks that have all layers."""
        space, rows = self.space, -(-self.batch // grid.dp)
        plan = replace(
            space.plan(grid._replace(pp=1), Pace(size, "1f1b", 1), states, Saving("full", "none", False)),
            dp=dp,
            replicate=states.replicate if dp == grid.dp else 1,
            global_batch=dp * rows,
        )
        times, longest = self._times(grid, size, "full"), self.work(grid, size, "full")
        share, whole = self._share(plan, by_layer)
        forward, backward = longest.all_forward, longest.total - longest.all_forward
        if by_layer:
            number = space.model.num_layers
            forward, backward = number * longest.forward, number * (longest.backward + longest.more)
        found = state_time(
            share, [whole], forward, backward, space.cluster, times.network, times.pricer, plan, self.stack
        )
        return found.each_forward + found.each_backward + found.casts_forward + found.casts_backward, found.once

    def _update(self, grid: Grid, size: int, states: States, offload: str) -> float:
        """Seconds of the optimizer on the mean rank."""
        shards = grid.dp // states.replicate * grid.cp if states.zero else 1
        rows = -(-self.batch // grid.dp)
        count = -(-rows // size) if offload == "all" else 0
        key = (
            grid.tp,
            grid.ep,
            grid.pp,
            shards,
            grid.ep > 1 and (grid.dp, grid.cp, states),
            offload,
            count,
            grid.gpus == 1,
        )
        if key not in self._updates:
            space = self.space
            plan = space.plan(grid._replace(pp=1), Pace(size, "1f1b", 1), states, Saving("none", offload, False))
            share, whole = self._share(plan)
            experts = share.spread_parameters if space.job.adapter.kind == "none" else 0
            mine = ((whole.trained - experts) / plan.state_shards + experts / plan.expert_shards) / grid.pp
            pricer = self._times(grid, size, "none").pricer
            update = optimizer_seconds(mine, 1, pricer, plan, space.job, self.stack)
            self._updates[key] = update + offload_seconds(mine, plan, self.space.cluster.per_node)
        return self._updates[key]

    def of_mode(self, grid: Grid, size: int, mode: str, sharing: Sharing) -> float:
        """Whatever the schedule."""
        rows, work = -(-self.batch // grid.dp), self.work(grid, size, mode)
        if grid.pp == 1:
            return self.slower(grid.gpus) * (work.total * rows / size + sharing.mean + sharing.once)
        count = -(-rows // size)
        least = max(work.total * count / grid.pp + sharing.mean, work.path)
        one, whole = work.forward + work.backward + sharing.layer, work.forward + work.backward
        quickest = math.inf
        for is_split, own, before in self._largest(grid.pp):
            quickest = min(quickest, own * count * one + before * (work.forward if is_split else whole))
        return self.slower(grid.gpus) * (max(least, quickest) + sharing.once)

    def paging(self, grid: Grid, size: int, saving: Saving) -> float:
        """Seconds per step that activations take longer to CPU memory and back than computing does (step_time.py); pipelines aside."""
        if not saving.activation_offload or grid.pp > 1:
            return 0.0
        mode, model = saving.recompute, self.space.model
        key = (*grid[1:5], grid.ep, size, mode, grid.gpus == 1)
        if key not in self._paged:
            parts = grid.tp if grid.sequence else 1
            spec, times = replace(tensor_slice(model, grid.tp), norm="layer"), self._times(grid, size, mode)
            kept = float(layer_activations(spec, spec.layers, 0, parts))
            if groups := segments(mode, range(len(spec.layers))):
                kept = len(groups) * spec.hidden // parts + kept * (1 - sum(map(len, groups)) / len(spec.layers))
            way = times.shape.here * kept * times.shape.size / host_rate(self.space.cluster)
            work = self.work(grid, size, mode)
            backward = work.total - work.all_forward
            self._paged[key] = max(0.0, way - work.all_forward) + max(0.0, way - backward)
        rows = -(-self.batch // grid.dp)
        return self.slower(grid.gpus) * self._paged[key] * (rows // size)

    def _largest(self, pp: int) -> list[tuple[bool, int, int]]:
        """Of every schedule: whether backward is split, layers of the rank that has most, layers before it. Those that can be quickest."""
        if pp not in self._larger:
            found = set()
            for schedule, virtual_stages in self.space.pipelines(pp):
                for turn in self.turns(schedule, pp, virtual_stages).values():
                    if not turn.has_last:
                        found.add((splits_backward(schedule), len(turn.own), turn.before))
            self._larger[pp] = [
                one
                for one in found
                if not any(o != one and o[0] >= one[0] and o[1] <= one[1] and o[2] <= one[2] for o in found)
            ]
        return self._larger[pp]

    @cached_property
    def _alike(self) -> bool:
        kinds = {(layer.window, layer.is_moe, layer.ffn) for layer in self.space.model.layers}
        return len(kinds) == 1 and self.space.job.adapter.kind == "none"

    def _share(self, plan: Plan, layers_only: bool = False) -> tuple[RankShare, Held]:
        """Of a rank that has all layers."""
        key = (plan.tp, plan.ep, layers_only)
        if key not in self._shares:
            alone = replace(plan, pp=1, schedule="1f1b", virtual_stages=1, split=())
            share = rank_shares(self.space.model, alone)[0]
            if layers_only:
                share = replace(share, cut=replace(share.cut, embedding=0, head=0))
            whole = groups_of(share.cut, self.space.model, self.space.job.adapter).whole
            self._shares[key] = share, whole
        return self._shares[key]

    def of_pace(self, grid: Grid, pace: Pace, mode: str, sharing: Sharing) -> float:
        rows = -(-self.batch // grid.dp)
        work = self.work(grid, pace.micro_batch, mode)
        if grid.pp == 1:
            return self.slower(grid.gpus) * (work.total * rows / pace.micro_batch + sharing.mean + sharing.once)
        count = -(-rows // pace.micro_batch)
        is_split = splits_backward(pace.schedule)
        least = max(work.total * count / grid.pp + sharing.mean, work.path if is_split else work.total)
        # A rank's first forward comes after those of the ranks before it, which have their whole backward still to do after its last,
        # unless they split it.
        whole = work.forward + work.backward
        around = work.forward if is_split else whole
        for turn in self.turns(pace.schedule, grid.pp, pace.virtual_stages).values():
            one = whole if turn.has_last else whole + sharing.layer
            own = len(turn.own) * one + turn.has_first * work.first + turn.has_last * work.last
            if work.more:
                own += work.more * self._repeated(turn.own, mode)
            least = max(least, turn.before * around + count * own)
        return self.slower(grid.gpus) * (least + sharing.once)

    def _repeated(self, layers: tuple[int, ...], mode: str) -> int:
        if mode not in self._again:
            parts = segments(mode, range(self.space.model.num_layers))
            self._again[mode] = frozenset(index for part in parts for index in part)
        return len(self._again[mode].intersection(layers))

    def of_plan(self, plan: Plan) -> float:
        """With what the ranks of a pipeline send for their weights; instead of the simulation, how long ranks that may be the slowest are
        busy, what they wait for before, and what others do after."""
        space = self.space
        if plan.pp == 1:
            return sum(step_seconds(space.model, space.cluster, space.job, plan, self.stack).values())
        times = layer_times(space.model, space.cluster, space.job, plan, self.stack)
        transfer = transfer_seconds(times, plan, self.stack)
        cuts, least, once = cuts_of(space.model, plan), 0.0, 0.0
        for rank, (mine, busy, around, hops) in self._stage_times(plan, times).items():
            share = RankShare(cuts[rank], 1, 0)
            state = rank_state(share, space.model, mine, space.cluster, space.job, plan, self.stack, times)
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
        update = self._update(grid, plan.micro_batch, States(plan.zero, plan.replicate), plan.offload)
        return self.slower(plan.world) * (least + once + update)

    def _room(self, plan: Plan) -> int:
        """Activations that the first rank of `zero-bubble` may hold (schedules.py)."""
        groups = max(1, plan.num_microbatches // plan.pp)
        return (plan.virtual_stages - 1) * -(-plan.num_microbatches // groups) + plan.pp

    def _stage_times(self, plan: Plan, times: LayerTimes) -> dict[int, tuple[list[StageTime], float, float, int]]:
        """Of ranks that may be the slowest: their stages, seconds of one micro-batch in them, of the ranks before and after it, and messages
        among these. Of the first rank of `zero-bubble`, as a negative number: seconds until its first backward."""
        key = (id(times), plan.pp, plan.schedule, plan.virtual_stages, plan.recompute)
        if key not in self._stages:
            stages = stage_times(self.space.model, plan, times, self.stack)
            owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages)
            is_split, found = splits_backward(plan.schedule), {}

            def add(rank: int, around: float, hops: int) -> None:
                mine = [stage for stage, owner in zip(stages, owners, strict=True) if owner == rank]
                found[rank] = (mine, sum(stage.forward + stage.backward for stage in mine), around, hops)

            for rank in self.turns(plan.schedule, plan.pp, plan.virtual_stages):
                add(rank, sum(stage.forward + (0.0 if is_split else stage.backward) for stage in stages[:rank]), rank)
            if plan.schedule == "zero-bubble":
                after = stages[len(stages) - plan.pp + 1 :]
                until = sum(stage.forward for stage in stages) + sum(stage.inputs for stage in after)
                add(0, -until, len(stages) - 1 + len(after))
            self._stages[key] = (found, times)  # which keeps its id
        return self._stages[key][0]

    def turns(self, schedule: str, pp: int, virtual_stages: int) -> dict[int, Turn]:
        """Of ranks that may be the slowest: of those with most layers the last, and the one with the head."""
        key = (schedule, pp, virtual_stages)
        if key not in self._turns:
            split = self.space.split(pp * virtual_stages)
            assert split is not None, key
            owners = stage_owners(schedule, pp, virtual_stages)
            own: list[list[int]] = [[] for _ in range(pp)]
            first = 0
            for owner, number in zip(owners, split, strict=True):
                own[owner] += range(first, first + number)
                first += number
            last = owners[-1]
            most = max(len(own[rank]) for rank in range(pp) if rank != last)
            largest = max(rank for rank in range(pp) if rank != last and len(own[rank]) == most)
            self._turns[key] = {
                rank: Turn(sum(split[:rank]), tuple(own[rank]), rank == 0, rank == last) for rank in (largest, last)
            }
        return self._turns[key]

    def work(self, grid: Grid, size: int, mode: str) -> Work:
        key = (grid.tp, grid.sequence, grid.cp, grid.cp_kind, grid.ep, size, mode, grid.gpus == 1)
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
            more=abs(_length(found[0][0]) - _length(found[1][0])) if self._alike and len(found) == 2 else 0.0,
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
            copies=space.may_copy(grid),
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
