"""Floors of memory: what a layout holds at least, told in microseconds. No torch.

Two counts. Of a whole grid: the first rank under the schedule that leaves it least; where layers differ, the mean over the pipeline's ranks,
because the fullest has no less. Of one layout: the first rank, which holds the most micro-batches of most schedules, and the first of those
with most parameters. Invariant, held by a test on random layouts: no floor is above the prediction. Read next: memory.py, which predicts;
branches.py, which asks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction.activations import kept_activations
from shardwise.plan.prediction.rank_share import Cut, cuts, numbers_of, stages_in_flight, stages_of_cut
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.states import COMPUTE_BYTES, WEIGHT_BYTES, gathered_bytes, groups_of, state_bytes
from shardwise.spec.model import ModelSpec
from shardwise.spec.recompute import segments
from shardwise.spec.schedules import SCHEDULES, stage_owners
from shardwise.spec.split import tensor_slice
from shardwise.spec.zero import ZERO

ROUNDED = 1 - 1e-5
"""Predictions are whole bytes, part by part."""


class Weights(NamedTuple):
    """Bytes of a rank that do not depend on its micro-batches."""

    always: float
    gathered: float
    gradients: float

    def beside(self, kept: float, several: bool) -> float:
        """With activations. `several`: gradients wait for further micro-batches; with one, they come while activations go."""
        rest = self.gathered + kept
        return ROUNDED * (self.always + (rest + self.gradients if several else max(rest, self.gradients)))


class Counted(NamedTuple):
    """Parameters of a rank. Beside adapters: bytes."""

    dense: float  # all but spread experts
    spread: float
    block: float  # of the smallest layer, where there are several
    frozen: float = 0.0  # bytes of all, as they lie there
    used: float = 0.0  # and as they are gathered


NOTHING = Weights(0.0, 0.0, 0.0)


class MemoryBounds:
    def __init__(self, space: Space, stack: Stack):
        # Whether products are joined depends on the adapters; what is sure is that nothing keeps an activated gate. Joined, all may be
        # large enough for fp8.
        less, least = stack.fused_activation or bool(stack.side_by_side), min(stack.fp8_least, 1)
        self.space, self.stack = space, replace(stack, side_by_side=(), fused_activation=less, fp8_least=least)
        self.seq_len, self.batch = space.job.seq_len, space.job.global_batch
        self.weight, self.compute = WEIGHT_BYTES[space.precision], COMPUTE_BYTES[space.precision]
        self.state = state_bytes(space.job.optimizer, space.precision)
        self.adapter = space.job.adapter
        self._saved: dict[int, ModelSpec] = {}
        self._grids: dict[tuple[int, int, int], Counted] = {}
        self._ranks: dict[tuple[object, ...], list[tuple[int, Counted, list[range]]]] = {}
        self._numbers: dict[tuple[object, ...], list[int]] = {}
        self._firsts: dict[int, list[tuple[str, int, list[range]]]] = {}
        self._lights: dict[tuple[int, str, int], list[tuple[float, float]]] = {}

    # Of a grid -----------------------------------------------------------------------------------------------------

    def of_grid(self, grid: Grid, size: int, states: States, offload: str) -> Weights:
        """The mean over the ranks of a pipeline: the fullest has no less. Or what its first rank has, where that is less: `kept` may be its."""
        key = (grid.tp, grid.ep, grid.pp)
        counted = self._grids.get(key)
        if counted is None:
            (cut,) = cuts(self.space.model, grid.tp, grid.ep, 1, "1f1b", 1, ())
            whole = self._count(cut)._replace(block=0.0)
            counted = Counted(*(part / grid.pp for part in whole))
            if grid.pp > 1 and self.are_alike:
                fewest = min(sum(map(len, chunks)) for _, _, chunks in self._first(grid.pp))
                share = fewest / len(self.space.model.layers)
                layers = whole.dense - cut.embedding - cut.head
                first = Counted(
                    cut.embedding + share * layers, share * whole.spread, 0.0, share * whole.frozen, share * whole.used
                )
                counted = Counted(*map(min, counted, first))
            self._grids[key] = counted
        return self._weights(grid, states, offload, -(-self.batch // grid.dp) > size, counted)

    def kept(self, grid: Grid, size: int, mode: str) -> float:
        """Activations, whatever the schedule: of all schedules the least that their first rank holds. Where layers are not alike, the last
        rank of an interleaved one holds the fewest micro-batches, half of one per rank of the pipeline."""
        tokens, count = self._tokens(grid, size), -(-self.batch // (grid.dp * size))
        if grid.pp == 1 or not self.are_alike:
            kept = self._kept(self._up_to(grid, mode), mode, [range(self.space.model.num_layers)]) * tokens
            return kept if grid.pp == 1 else kept * max(1.0, min(count, grid.pp) / 2) / grid.pp
        one, again = self._up_to(grid, "selective" if mode == "selective" else "none")[1], self._up_to(grid, "full")[1]
        return min([layers * one + inputs * again for layers, inputs in self._lightest(grid.pp, mode, count)]) * tokens

    def _lightest(self, pp: int, mode: str, count: int) -> list[tuple[float, float]]:
        """Of every schedule that may hold the least, its first rank: layers that keep all they compute, inputs of others."""
        key = (pp, mode, count)
        if key not in self._lights:
            found = set()
            for schedule, stages, chunks in self._first(pp):
                share = stages_in_flight(schedule, pp, stages, count, 0) / stages
                parts = [part for layers in chunks for part in segments(mode, layers)]
                plain = sum(map(len, chunks)) - sum(map(len, parts))
                found.add((plain * share, len(parts) * share))
            self._lights[key] = [
                one for one in found if not any(o != one and o[0] <= one[0] and o[1] <= one[1] for o in found)
            ]
        return self._lights[key]

    @cached_property
    def are_alike(self) -> bool:
        return len({(layer.window, layer.is_moe, layer.ffn) for layer in self.space.model.layers}) == 1

    def _first(self, pp: int) -> list[tuple[str, int, list[range]]]:
        """Of every schedule: its name, stages per rank, layers of each stage of the first rank."""
        if pp not in self._firsts:
            found = []
            for schedule, virtual_stages in self.space.pipelines(pp):
                split, owners = self.space.split(pp * virtual_stages), stage_owners(schedule, pp, virtual_stages)
                assert split is not None, (schedule, pp, virtual_stages)
                stages = zip(owners, split, accumulate(split), strict=True)
                chunks = [range(stop - number, stop) for owner, number, stop in stages if owner == 0]
                found.append((schedule, virtual_stages, chunks))
            self._firsts[pp] = found
        return self._firsts[pp]

    # Of a layout ---------------------------------------------------------------------------------------------------

    def of_layout(self, grid: Grid, pace: Pace, states: States, saving: Saving) -> float:
        several = -(-self.batch // grid.dp) > pace.micro_batch
        kept = self.activations(grid, pace, saving.recompute, saving.activation_offload)
        weights = self.weights(grid, pace, states, saving.offload)
        return max(one.beside(held, several) for one, held in zip(weights, kept, strict=True))

    def weights(self, grid: Grid, pace: Pace, states: States, offload: str) -> list[Weights]:
        """Of ranks that may be the fullest."""
        several = -(-self.batch // grid.dp) > pace.micro_batch
        return [self._weights(grid, states, offload, several, counted) for _, counted, _ in self._fullest(grid, pace)]

    def activations(self, grid: Grid, pace: Pace, mode: str, away: bool) -> list[float]:
        """Of the same ranks."""
        _, schedule, virtual_stages = pace
        tokens, count = self._tokens(grid, pace.micro_batch), -(-self.batch // (grid.dp * pace.micro_batch))
        found, kept = [], self._up_to(grid, mode)
        for rank, _, chunks in self._fullest(grid, pace):
            held = 0 if away else tokens * self._kept(kept, mode, chunks)
            found.append(held * stages_in_flight(schedule, grid.pp, virtual_stages, count, rank) / virtual_stages)
        return found

    def _fullest(self, grid: Grid, pace: Pace) -> list[tuple[int, Counted, list[range]]]:
        """The first rank, and the first of those with most parameters: what they have, and the layers of each of their stages."""
        key = (grid.tp, grid.ep, grid.pp, SCHEDULES[pace.schedule].is_v, pace.virtual_stages)
        found = self._ranks.get(key)
        if found is None:
            split = self.space.split(grid.pp * pace.virtual_stages) if grid.pp > 1 else ()
            assert split is not None, (grid, pace)
            every = cuts(self.space.model, grid.tp, grid.ep, grid.pp, pace.schedule, pace.virtual_stages, split)
            most = max(range(grid.pp), key=lambda rank: every[rank].num_parameters)
            found = self._ranks[key] = [
                (rank, self._count(every[rank]), list(map(numbers_of, stages_of_cut(every[rank], split))))
                for rank in sorted({0, most})
            ]
        return found

    # What both are made of -----------------------------------------------------------------------------------------

    def _count(self, cut: Cut) -> Counted:
        if self.adapter.kind != "none":
            whole = groups_of(cut, self.space.model, self.adapter).whole
            used = gathered_bytes(whole, self.compute)
            return Counted(0.0, 0.0, 0.0, self.weight * whole.trained + used - self.compute * whole.trained, used)
        spread = cut.spread_parameters
        block = min(cut.layer_parameters) if len(cut.layers) > 1 and not spread else 0
        return Counted(cut.num_parameters - spread, spread, block)

    def _weights(self, grid: Grid, states: States, offload: str, several: bool, counted: Counted) -> Weights:
        if offload == "all":
            return NOTHING
        shards = grid.dp // states.replicate * grid.cp if states.zero else 1
        copies = grid.dp * grid.cp * grid.tp // grid.ep
        dense, spread, block, frozen, used = counted
        if self.adapter.kind != "none":  # what is trained is small
            parts = max(shards, copies) if states.zero else 1
            return Weights(frozen / parts, used if ZERO[states.zero].keeps_gathered else 0.0, 0.0)
        own = dense / shards + (spread / copies if states.zero else spread)
        gathered = 0.0
        if ZERO[states.zero].keeps_gathered or (not states.zero and self.compute != self.weight):
            gathered = (dense + spread) * self.compute
        elif ZERO[states.zero].drops_parameters:
            gathered = 2.0 * block * self.compute
        gradients = own * self.weight
        if ZERO[states.zero].keeps_gradients and several:  # they add up where they are computed
            gradients += (dense + spread) * self.weight
        if offload == "optimizer":
            return Weights(own * self.weight, gathered, gradients if several or states.replicate > 1 else 0.0)
        return Weights(own * (self.weight + self.state), gathered, gradients)

    def _tokens(self, grid: Grid, size: int) -> int:
        return size * self.seq_len // grid.cp * self.compute

    def _spec(self, tp: int) -> ModelSpec:
        """As lifetimes.py has it: CUDA's norms and compiled ones keep their input alone."""
        if tp not in self._saved:
            spec = tensor_slice(self.space.model, tp)
            self._saved[tp] = (
                replace(spec, norm="layer") if self.space.device == "cuda" or self.stack.compiled else spec
            )
        return self._saved[tp]

    def _kept(self, up_to: list[int], mode: str, stages: list[range]) -> int:
        """Numbers per token that these layers keep of one micro-batch, as activations.py counts them: of what is computed again its input."""
        if mode == "sqrt":
            return up_to[1] * sum([len(segments(mode, layers)) for layers in stages])
        return sum([up_to[layers.stop] - up_to[layers.start] for layers in stages])

    def _up_to(self, grid: Grid, mode: str) -> list[int]:
        """Numbers of the layers before each."""
        how = (grid.tp, grid.sequence, grid.cp > 1 and grid.cp_kind, grid.ep > 1, mode)
        found = self._numbers.get(how)
        if found is None:
            found = self._numbers[how] = self._count_up(grid, mode)
        return found

    def _count_up(self, grid: Grid, mode: str) -> list[int]:
        spec, parts = self._spec(grid.tp), grid.tp if grid.sequence else 1
        keys = 0 if grid.cp > 1 and grid.cp_kind == "ring" else self.seq_len
        exchanged, routed = grid.cp > 1 and grid.cp_kind == "ulysses", grid.tp if grid.ep > 1 else 1
        again = {index for part in segments(mode, range(len(spec.layers))) for index in part}
        one = "selective" if mode == "selective" else "none"
        known: dict[object, int] = {}
        found = [0]
        for layer in spec.layers:
            kind = (layer.window, layer.is_moe, layer.ffn)
            if kind not in known:
                kept = kept_activations(spec, (layer,), one, keys, parts, routed, exchanged, self.stack)
                known[kind] = kept.between
            found.append(found[-1] + (spec.hidden // parts if layer.index in again else known[kind]))
        return found
