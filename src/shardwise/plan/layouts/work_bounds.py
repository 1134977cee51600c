"""Seconds of one micro-batch through the whole model: what lower bounds of step time are made of. No torch.

Layouts that cut layers alike share them. Invariant: no layout with these degrees computes faster. Read next:
time_bounds.py.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from shardwise.plan.layouts.parts import Grid
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction.layer_time import LayerTimes, add
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.step_time import StageTime, layer_times, stage_time
from shardwise.plan.remembered import remembered
from shardwise.plan.resolve.speed import attending, kernels_of, loss_of, our_stack
from shardwise.spec.model import LayerSpec
from shardwise.spec.plan import Plan
from shardwise.spec.recompute import segments

FASTEST, SPLIT, SLOWEST = "fastest", "split", "slowest"
"""Kernels: all that a layout may have; those of a split backward; those that every schedule has."""


class Work(NamedTuple):
    """The seconds of one micro-batch through the model, by the prices of a step."""

    whole: StageTime  # all layers and both ends, as one stage
    layers: StageTime  # all layers without the ends
    forward: float  # of the quickest layer, without waiting for the host
    backward: float
    more: float  # of a layer that is computed again, where others are not
    first: float  # embedding
    last: float  # head

    @property
    def total(self) -> float:
        return self.whole.forward + self.whole.backward

    @property
    def path(self) -> float:
        """The seconds of all but the weights' gradients, which one micro-batch cannot spend side by side."""
        return self.whole.forward + self.whole.inputs


class Works:
    """The least seconds of micro-batches. `stack`: another framework's; None: ours, with all that a layout bears."""

    def __init__(self, space: Space, stack: Stack | None):
        self.space, self.stack = space, stack
        self._works: dict[tuple[object, ...], Work] = {}
        self._times: dict[tuple[object, ...], LayerTimes] = {}

    def of(self, grid: Grid, size: int, mode: str, kernels: str = FASTEST, shared: bool = False) -> Work:
        """Returns the seconds of one micro-batch. `shared`: the host also starts what gathers parameters."""
        key = (*grid[1:5], grid.ep, size, mode, self.alone(grid), kernels, shared)
        found = self._works.get(key)
        if found is None:
            found = self._works[key] = self._add_up(self.times(grid, size, mode, kernels, shared), mode)
        return found

    def alone(self, grid: Grid) -> tuple[bool, int]:
        """Returns what else a layer's price depends on: one rank may keep low-precision weights, and fewer ranks on a
        CPU have more threads each."""
        return grid.gpus == 1, self.space.threads(grid.gpus)

    def stack_for(self, kernels: str = FASTEST) -> Stack:
        if self.stack is not None:
            return self.stack
        if kernels == FASTEST:
            return self.space.fastest
        speed, device, model = self.space.speed, self.space.device, self.space.model
        able = kernels_of(speed, device, model, 2, "zero-bubble")
        loss = loss_of(speed, 2, "gpipe" if kernels == SLOWEST else "zero-bubble")
        return our_stack(
            able["compile"] != "none", able["fuse"], loss == "fused", able["products"] == "measured", *self.space.fp8
        )

    def times(self, grid: Grid, size: int, mode: str, kernels: str = FASTEST, shared: bool = False) -> LayerTimes:
        key = (*grid[1:5], grid.ep, size, mode == "selective", self.alone(grid), kernels, shared)
        found = self._times.get(key)
        if found is None:
            found = self._times[key] = self._make_times(grid, size, mode, kernels, shared)
        return found

    def _make_times(self, grid: Grid, size: int, mode: str, kernels: str, shared: bool) -> LayerTimes:
        space, dp = self.space, -(-grid.ep // (grid.cp * grid.tp))  # as few as hold all experts
        plan = Plan(
            device=space.device,
            precision=space.precision,
            seq_len=space.job.seq_len,
            global_batch=size * dp,
            micro_batch=size,
            num_steps=1,
            threads_per_rank=space.threads(grid.gpus),
            reason="one micro-batch",
            **grid._replace(dp=dp, pp=1)._asdict(),
            recompute=mode,
            zero=3 if shared else 0,
            copies=space.may_copy(grid) and not shared,
        )
        stack = self.stack or attending(self.stack_for(kernels), space.attention(grid))
        return layer_times(space.model, space.cluster, space.job, plan, stack)

    @cached_property
    def are_alike(self) -> bool:
        """Whether all layers are of one kind and all of their parameters are trained."""
        kinds = {layer.kind for layer in self.space.model.layers}
        return len(kinds) == 1 and self.space.job.adapter.kind == "none"

    def _add_up(self, times: LayerTimes, mode: str) -> Work:
        found = [times.layer(layer, again) for layer, again, _ in self._kinds(mode)]
        layers = times.stage([(layer, again) for layer, again, count in self._kinds(mode) for _ in range(count)])
        first, last = times.ends
        lengths = [one.device_forward + one.device_backward for one in (*found, first, last)]
        return Work(
            whole=stage_time(add((layers, first, last))),
            layers=stage_time(layers),
            forward=min(one.device_forward for one in found),
            backward=min(one.device_backward for one in found),
            more=abs(lengths[0] - lengths[1]) if self.are_alike and len(found) == 2 else 0.0,
            first=lengths[-2],
            last=lengths[-1],
        )

    @remembered
    def _kinds(self, mode: str) -> list[tuple[LayerSpec, bool, int]]:
        """Returns for each kind of layer one of them, whether it is computed again, and how many are like it."""
        layers = self.space.model.layers
        again = {index for part in segments(mode, range(len(layers))) for index in part}
        counted: dict[object, list[LayerSpec]] = {}
        for layer in layers:
            counted.setdefault((layer.kind, layer.index in again), []).append(layer)
        return [(same[0], same[0].index in again, len(same)) for same in counted.values()]
