"""Lower bounds of memory: what every layout of a region holds at least, computed in microseconds. No torch.

Nothing is counted here: weights, gradients and optimizer state are those that states.py predicts, and activations those
of lifetimes.py, of a rank that holds the least a region allows. That is the first rank under the schedule that leaves
it least; where layers differ, the mean over the pipeline's ranks, because the fullest has no less. Invariant, held by a
test on random layouts and with every price changed: no bound is above the prediction. Read next: memory.py, which
predicts; branches.py, which asks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction.lifetimes import held_bytes, kept_by_stages, state_parts, while_forward
from shardwise.plan.prediction.rank_share import RankShare, numbers_of, shares_of, stages_in_flight, stages_of
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.states import groups_of, offloaded, states_of
from shardwise.plan.remembered import remembered
from shardwise.spec.recompute import segments
from shardwise.spec.schedules import SCHEDULES

JUST_BELOW = 1 - 1e-5
"""Bounds stay below predictions, which are whole bytes, part by part."""

Pipeline = tuple[str, int]
"""Schedule and stages per rank."""


class Weights(NamedTuple):
    """The lower bounds of a rank's bytes that do not depend on its micro-batches."""

    always: float
    forward: float  # beside these, while all activations are there
    complete: float  # gradients, when all activations are gone
    host: float  # in CPU memory

    def beside(self, kept: float) -> float:
        """Returns the lower bound of a rank's bytes beside `kept` bytes of activations."""
        return JUST_BELOW * (self.always + max(self.forward + kept, self.complete))


NOTHING = Weights(0.0, 0.0, 0.0, 0.0)


class MemoryBounds:
    """Lower bounds of what a device must hold, in bytes, for regions of layouts."""

    def __init__(self, space: Space, stack: Stack):
        # Whether matmuls are fused depends on the adapters; what is sure is that nothing keeps an activated gate.
        # Fused, all may be large enough for fp8.
        less, least = stack.fused_activation or bool(stack.side_by_side), min(stack.fp8_least, 1)
        self.space, self.stack = space, replace(stack, side_by_side=(), fused_activation=less, fp8_least=least)
        self.seq_len, self.batch = space.job.seq_len, space.job.global_batch
        self._weights: dict[tuple[object, ...], Weights] = {}
        self._smallest: dict[tuple[int, int, int], tuple[Pipeline, RankShare]] = {}
        self._kept: dict[tuple[object, ...], int] = {}

    @cached_property
    def are_alike(self) -> bool:
        return len({layer.kind for layer in self.space.model.layers}) == 1

    def _is_mean(self, grid: Grid) -> bool:
        """Returns whether all ranks of a pipeline are counted together, and divided by their number."""
        return grid.pp > 1 and not self.are_alike

    # Weights, gradients, optimizer state ---------------------------------------------------------------------------

    def of_grid(self, grid: Grid, size: int, states: States, offload: str) -> Weights:
        shards = grid.dp // states.replicate * grid.cp if states.zero else 1
        ranks = (grid.dp, grid.cp) if grid.ep > 1 else grid.dp * grid.cp > 1
        several, is_copied = -(-self.batch // grid.dp) > size, states.replicate > 1
        key = (grid.tp, grid.ep, grid.pp, shards, ranks, states.zero, is_copied, offload, several, grid.gpus == 1)
        found = self._weights.get(key)
        if found is None:
            found = self._weights[key] = self._of_states(grid, size, states, offload)
        return found

    def _of_states(self, grid: Grid, size: int, states: States, offload: str) -> Weights:
        space, job = self.space, self.space.job
        parts_of = grid.pp if self._is_mean(grid) else 1
        how, share = self._first_rank(grid)
        one = grid._replace(pp=1) if parts_of > 1 else grid
        plan = space.plan(one, Pace(size, *how), states, Saving("none", offload, False))
        held = states_of(share, groups_of(share, space.model, job.adapter), plan, job.optimizer, self.stack)
        parts, away = state_parts(held), {"host": 0}
        if offload != "none":
            if plan.offload == "all" and plan.offload_to == "nvme":  # weights pass through what is free
                return NOTHING
            here, away = offloaded(parts | {"process": 0}, share, plan)
            parts |= here
        always, forward = parts["weights"] + parts["optimizer"], while_forward(held, parts, 0)
        return Weights(*(size / parts_of for size in (always, forward, parts["gradients"], away["host"])))

    def _first_rank(self, grid: Grid) -> tuple[Pipeline, RankShare]:
        """Returns the schedule whose first rank has the fewest parameters, and that rank's share; or the share of a
        rank that has all layers."""
        pp = 1 if self._is_mean(grid) else grid.pp
        key = (grid.tp, grid.ep, pp)
        if key not in self._smallest:
            every = [
                (how, self._share(grid, pp, *how)) for how in (self.space.pipelines(pp) if pp > 1 else [("1f1b", 1)])
            ]
            self._smallest[key] = min(every, key=lambda one: one[1].num_parameters)
        return self._smallest[key]

    def _share(self, grid: Grid, pp: int, schedule: str, virtual_stages: int) -> RankShare:
        split = self.space.split(pp * virtual_stages) if pp > 1 else ()
        assert split is not None, (grid, schedule, virtual_stages)
        is_v = SCHEDULES[schedule].is_v
        return shares_of(self.space.model, grid.tp, grid.ep, pp, is_v, virtual_stages, split)[0]

    # Activations ---------------------------------------------------------------------------------------------------

    def kept(self, grid: Grid, size: int, mode: str) -> float:
        """Returns the lower bound of activations in bytes: of all schedules the least that their first rank holds.
        Where layers are not alike, the last rank of an interleaved one holds the fewest micro-batches, half of one per
        rank of the pipeline."""
        count = -(-self.batch // (grid.dp * size))
        if grid.pp == 1 or self._is_mean(grid):
            kept = self._held(grid, 1, size, mode, ("1f1b", 1), 1)
            return kept if grid.pp == 1 else kept * max(1.0, min(count, grid.pp) / 2) / grid.pp
        lightest = self._lightest(grid.pp, mode, count)
        return min([self._held(grid, grid.pp, size, mode, how, flight) for how, flight in lightest])

    def of_layout(self, grid: Grid, pace: Pace, states: States, saving: Saving) -> float:
        """Returns the lower bound of the bytes of one layout, whose schedule is known."""
        size, how = pace.micro_batch, (pace.schedule, pace.virtual_stages)
        weights = self.of_grid(grid, size, states, saving.offload)
        if saving.activation_offload:
            return weights.beside(0.0)
        if grid.pp == 1 or self._is_mean(grid):
            return weights.beside(self.kept(grid, size, saving.recompute))
        flight = stages_in_flight(how[0], grid.pp, how[1], -(-self.batch // (grid.dp * size)), 0)
        return weights.beside(self._held(grid, grid.pp, size, saving.recompute, how, flight))

    def _held(self, grid: Grid, pp: int, size: int, mode: str, how: Pipeline, flight: int) -> int:
        between, tokens = self._between(grid, pp, mode, how), size * self.seq_len // grid.cp
        return held_bytes(between, tokens, self.space.precision, flight, how[1])

    def _between(self, grid: Grid, pp: int, mode: str, how: Pipeline) -> int:
        """Returns the elements per token that all stages of the first rank keep."""
        key = (grid.tp, grid.sequence, grid.cp > 1 and grid.cp_kind, grid.ep, pp, mode, how)
        found = self._kept.get(key)
        if found is None:
            plan = self.space.plan(grid._replace(pp=pp), Pace(1, *how), States(0, grid.dp), Saving(mode, "none", False))
            stages = kept_by_stages(self._share(grid, pp, *how), plan, self.stack)
            found = self._kept[key] = sum(stage.between for stage in stages)
        return found

    @remembered
    def _lightest(self, pp: int, mode: str, count: int) -> list[tuple[Pipeline, int]]:
        """Returns the schedules whose first rank may hold the least, by layers that keep all they compute and by inputs
        of others, each with the number of activations that it has in flight."""
        found: dict[tuple[float, float], tuple[Pipeline, int]] = {}
        for how in self.space.pipelines(pp):
            share, split = self._share(Grid(1, 1, False, 1, "ring", pp, 1), pp, *how), self.space.split(pp * how[1])
            assert split is not None
            chunks = list(map(numbers_of, stages_of(share, split)))
            flight = stages_in_flight(how[0], pp, how[1], count, 0)
            parts = [part for layers in chunks for part in segments(mode, layers)]
            plain = sum(map(len, chunks)) - sum(map(len, parts))
            found.setdefault((plain * flight / how[1], len(parts) * flight / how[1]), (how, flight))

        def is_beaten(one: tuple[float, float]) -> bool:
            return any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in found)

        return [what for one, what in found.items() if not is_beaten(one)]
