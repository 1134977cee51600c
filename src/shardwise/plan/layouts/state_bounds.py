"""What sharing the weights out, summing their gradients and updating them adds to a step at least. No torch.

Read next: state_time.py, which predicts it; time_bounds.py, which adds it to computing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.pipeline_bounds import Turns
from shardwise.plan.layouts.space import Space
from shardwise.plan.layouts.work_bounds import FASTEST, SLOWEST, Works
from shardwise.plan.prediction.collectives import Network, network_of, odd_world
from shardwise.plan.prediction.rank_share import RankShare, rank_shares
from shardwise.plan.prediction.state_time import offload_seconds, optimizer_seconds, state_time
from shardwise.plan.prediction.step_time import trained_parameters
from shardwise.spec.plan import Plan


class Sharing(NamedTuple):
    """The least time that sharing parameters and gradients adds to computing."""

    mean: float  # seconds per step of the mean rank
    layer: float  # or: seconds per micro-batch and layer, where a rank has layers alone and all are alike
    cast: float  # of these, what nothing hides, whatever the rank has beside its layers
    once: float  # seconds per step


class Sharings:
    """Lower bounds of `Sharing` for the parts of a layout; remembered."""

    def __init__(self, space: Space, works: Works, turns: Turns):
        self.space, self.works, self.turns = space, works, turns
        self._collectives: dict[tuple[object, ...], tuple[float, float, float]] = {}
        self._updates: dict[tuple[object, ...], float] = {}
        self._shares: dict[tuple[int, int, bool], RankShare] = {}

    def of(self, grid: Grid, size: int, states: States, offload: str) -> Sharing:
        """Returns the least that sharing weights adds: without a pipeline what is predicted; with one, that of its
        layers alone, in equal parts, or where they differ that of all ranks together. What computing hides is convex in
        sizes, so the mean over ranks is no less. Nothing computes longer than where all is computed again."""
        pp, by_layer = grid.pp, grid.pp > 1 and self.works.are_alike
        rows = -(-self.space.job.global_batch // grid.dp)
        # Replicas of shards meet once more: not counted, so that all of them have one price.
        dp = grid.dp // states.replicate if states.zero and grid.ep == 1 else grid.dp
        replicas = grid.ep > 1 and states.replicate
        world = odd_world(self.space.cluster, grid.gpus)
        # One rank keeps low-precision weights, unless its states are elsewhere.
        alone = offload if grid.gpus == 1 else ""
        several, priced = (rows > size, pp > 1), self.works.alone(grid)
        key = (*grid[1:5], grid.ep, size, states.zero, dp, several, alone, replicas, world, priced)
        found = self._collectives.get(key)
        if found is None:
            network = network_of(self.space.cluster, world)
            found = self._collectives[key] = self._sharing(grid, size, states, dp, by_layer, network, alone)
        each, casts, once = found
        update = self.update(grid, size, states, offload)
        if by_layer:
            most, number = self.turns.fewest(pp), self.space.model.num_layers
            return Sharing(0.0, each / number, casts / number, once * most / number + update)
        return Sharing(each * -(-rows // size) / pp, 0.0, 0.0, once / pp + update)

    def update(self, grid: Grid, size: int, states: States, offload: str) -> float:
        """Returns the seconds of the optimizer on the mean rank."""
        shards = grid.dp // states.replicate * grid.cp if states.zero else 1
        rows = -(-self.space.job.global_batch // grid.dp)
        count = -(-rows // size) if offload == "all" else 0
        spread = grid.ep > 1 and (grid.dp, grid.cp, states)
        # Gradients beside low-precision weights are wider where several are added up.
        alone = (rows > size,) if grid.gpus == 1 else None
        key = (grid.tp, grid.ep, grid.pp, shards, spread, offload, count, alone, self.works.alone(grid))
        found = self._updates.get(key)
        if found is None:
            found = self._updates[key] = self._update(grid, size, states, offload)
        return found

    def _sharing(
        self, grid: Grid, size: int, states: States, dp: int, by_layer: bool, network: Network, alone: str
    ) -> tuple[float, float, float]:
        """Returns the seconds per micro-batch, those of them for casts, and those per step, of all layers."""
        space, rows = self.space, -(-self.space.job.global_batch // grid.dp)
        plan = space.plan(
            grid._replace(pp=1, dp=dp),
            Pace(size, "1f1b", 1),
            States(states.zero, states.replicate if dp == grid.dp else 1),
            Saving("full", alone or "none", False),
            global_batch=dp * rows,
        )
        times = self.works.times(grid, size, "full")
        longest = self.works.of(grid, size, "full", SLOWEST if grid.pp > 1 else FASTEST, plan.uses_fsdp)
        share = self.share(plan, by_layer)
        beside = longest.layers if by_layer else longest.whole
        found = state_time(share, beside.forward, beside.backward, network, times, plan)
        casts = found.casts_forward + found.casts_backward
        return found.each_forward + found.each_backward + casts, casts, found.once

    def _update(self, grid: Grid, size: int, states: States, offload: str) -> float:
        space = self.space
        plan = space.plan(grid._replace(pp=1), Pace(size, "1f1b", 1), states, Saving("none", offload, False))
        times = self.works.times(grid, size, "none")
        mine = trained_parameters(self.share(plan), times, plan) / grid.pp
        update = optimizer_seconds(mine, times, plan, space.job.optimizer)
        return update + offload_seconds(mine, plan, space.cluster.per_node)

    def share(self, plan: Plan, layers_only: bool = False) -> RankShare:
        """Returns the share of a rank that has all layers."""
        key = (plan.tp, plan.ep, layers_only)
        if key not in self._shares:
            share = rank_shares(self.space.model, plan)[0]
            self._shares[key] = replace(share, embedding=0, head=0) if layers_only else share
        return self._shares[key]
