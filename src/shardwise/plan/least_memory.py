"""Floors of memory: what a layout holds at least, told in microseconds. No torch.

Two counts. Of a whole grid: the mean over the pipeline's ranks, with one micro-batch in flight, because the fullest rank has no less. Of one
layout: the first rank, which holds the most micro-batches of most schedules. Invariant, held by a test on random layouts: no floor is above
the prediction. Read next: memory.py, which predicts; best_first.py, which asks.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

from shardwise.model.spec import LayerSpec, ModelSpec
from shardwise.plan.activations import kept_activations
from shardwise.plan.memory import COMPUTE_BYTES, WEIGHT_BYTES, state_bytes
from shardwise.plan.rank_share import expert_parameters, tensor_slice
from shardwise.plan.schedules import stage_owners
from shardwise.plan.space import Grid, Pace, Saving, Space, States
from shardwise.plan.stack import Stack

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


class MemoryFloors:
    def __init__(self, space: Space, stack: Stack):
        self.space, self.stack = space, stack
        self.seq_len, self.batch = space.job.seq_len, space.job.global_batch
        self.weight, self.compute = WEIGHT_BYTES[space.precision], COMPUTE_BYTES[space.precision]
        self.state = state_bytes(space.job.optimizer, space.precision)
        self.adapter = space.job.adapter.kind
        self._slices: dict[int, ModelSpec] = {}
        self._parameters: dict[tuple[object, ...], tuple[int, int, int]] = {}
        self._numbers: dict[tuple[object, ...], float] = {}
        self._least: dict[int, int] = {}
        self._first: dict[tuple[object, ...], list[tuple[LayerSpec, ...]]] = {}

    # Of a grid -----------------------------------------------------------------------------------------------------

    def of_grid(self, grid: Grid, size: int, states: States, offload: str) -> Weights:
        """The mean over the ranks of a pipeline: the fullest has no less."""
        dense, spread, _ = self._count(grid, self._slice(grid.tp).layers, ends=True)
        several = -(-self.batch // grid.dp) > size
        return self._weights(grid, states, offload, several, dense / grid.pp, spread / grid.pp, 0)

    def kept(self, grid: Grid, size: int, mode: str) -> float:
        """Activations, whatever the schedule. Its first rank holds at least one micro-batch per rank of the pipeline; where layers are
        not alike, the last rank of an interleaved one holds the fewest, half of that."""
        if self.adapter != "none":
            return 0.0
        layers = self._slice(grid.tp).layers
        kept = self._kept(grid, mode, layers) * self._tokens(grid, size)
        if grid.pp == 1:
            return kept
        rows = -(-self.batch // grid.dp)
        flying = min(-(-rows // size), grid.pp)
        if self.are_alike and mode in ("none", "selective", "full"):
            return kept * flying * self._fewest(grid.pp) / len(layers)
        return kept * max(1.0, flying / 2) / grid.pp

    @cached_property
    def are_alike(self) -> bool:
        return len({(layer.window, layer.is_moe, layer.ffn) for layer in self.space.model.layers}) == 1

    def _fewest(self, pp: int) -> int:
        """Layers of the first rank, of all schedules the least."""
        if pp not in self._least:
            found = []
            for schedule, virtual_stages in self.space.pipelines(pp):
                split, owners = self.space.split(pp * virtual_stages), stage_owners(schedule, pp, virtual_stages)
                assert split is not None, (schedule, pp, virtual_stages)
                found.append(sum(number for number, owner in zip(split, owners, strict=True) if owner == 0))
            self._least[pp] = min(found)
        return self._least[pp]

    # Of a layout ---------------------------------------------------------------------------------------------------

    def of_layout(self, grid: Grid, pace: Pace, states: States, saving: Saving) -> float:
        several = -(-self.batch // grid.dp) > pace.micro_batch
        kept = self.activations(grid, pace, saving.recompute, saving.activation_offload)
        return self.weights(grid, pace, states, saving.offload).beside(kept, several)

    def weights(self, grid: Grid, pace: Pace, states: States, offload: str) -> Weights:
        key = (grid.tp, grid.ep, grid.pp, pace.schedule == "zbv", pace.virtual_stages)
        if key not in self._parameters:
            mine = tuple(layer for chunk in self._chunks(grid, pace) for layer in chunk)
            self._parameters[key] = self._count(grid, mine, ends=False)
        several = -(-self.batch // grid.dp) > pace.micro_batch
        return self._weights(grid, states, offload, several, *self._parameters[key])

    def activations(self, grid: Grid, pace: Pace, mode: str, away: bool) -> float:
        if away or self.adapter != "none":
            return 0.0
        kept = sum(self._kept(grid, mode, chunk) for chunk in self._chunks(grid, pace)) / pace.virtual_stages
        return kept * self._in_flight(grid, pace) * self._tokens(grid, pace.micro_batch)

    def _in_flight(self, grid: Grid, pace: Pace) -> int:
        """Activations of a stage that the first rank holds at most, as rank_share.py has them; of split backwards, only what is certain."""
        if grid.pp == 1:
            return 1
        rows, pp, v = -(-self.batch // grid.dp), grid.pp, pace.virtual_stages
        count = -(-rows // pace.micro_batch)
        group = -(-count // max(1, count // pp))
        if pace.schedule == "1f1b":
            most = pp
        elif pace.schedule == "interleaved":
            most = (v - 1) * group + 2 * (pp - 1) + 1
        elif pace.schedule == "zero-bubble":
            most = (v - 1) * group + pp
        elif pace.schedule == "zbv":
            most = 2 * pp
        else:
            most = count
        return min(count * v, most)

    def _chunks(self, grid: Grid, pace: Pace) -> list[tuple[LayerSpec, ...]]:
        """Layers of each stage of the first rank."""
        key = (grid.tp, grid.pp, pace.schedule == "zbv", pace.virtual_stages)
        if key not in self._first:
            layers = self._slice(grid.tp).layers
            if grid.pp == 1:
                self._first[key] = [layers]
            else:
                split = self.space.split(grid.pp * pace.virtual_stages)
                assert split is not None, (grid, pace)
                owners = stage_owners(pace.schedule, grid.pp, pace.virtual_stages)
                mine = [stage for stage, owner in enumerate(owners) if owner == 0]
                ends = [sum(split[: stage + 1]) for stage in mine]
                self._first[key] = [layers[end - split[stage] : end] for end, stage in zip(ends, mine, strict=True)]
        return self._first[key]

    # What both are made of -----------------------------------------------------------------------------------------

    def _weights(
        self, grid: Grid, states: States, offload: str, several: bool, dense: float, spread: float, block: int
    ) -> Weights:
        """`block`: parameters of one layer."""
        if offload == "all" or self.adapter != "none":
            return Weights(0.0, 0.0, 0.0)
        shards = grid.dp // states.replicate * grid.cp if states.zero else 1
        copies = grid.dp * grid.cp * grid.tp // grid.ep
        own = dense / shards + (spread / copies if states.zero else spread)
        gathered = 0.0
        if states.zero in (1, 2) or (states.zero == 0 and self.compute != self.weight):
            gathered = (dense + spread) * self.compute
        elif states.zero == 3:
            gathered = 2.0 * block * self.compute
        gradients = own * self.weight
        if states.zero == 1 and several:  # they add up where they are computed
            gradients += (dense + spread) * self.weight
        if offload == "optimizer":
            return Weights(own * self.weight, gathered, gradients if several or states.replicate > 1 else 0.0)
        return Weights(own * (self.weight + self.state), gathered, gradients)

    def _tokens(self, grid: Grid, size: int) -> int:
        return size * self.seq_len // grid.cp * self.compute

    def _slice(self, tp: int) -> ModelSpec:
        if tp not in self._slices:
            self._slices[tp] = tensor_slice(self.space.model, tp)
        return self._slices[tp]

    def _saved(self, tp: int) -> ModelSpec:
        """As lifetimes.py has it: CUDA's norms keep their input alone."""
        if -tp not in self._slices:
            spec = self._slice(tp)
            self._slices[-tp] = spec.with_overrides({"norm": "layer"}) if self.space.device == "cuda" else spec
        return self._slices[-tp]

    def _count(self, grid: Grid, layers: tuple[LayerSpec, ...], ends: bool) -> tuple[int, int, int]:
        """Parameters: all but spread experts, spread experts, the smallest layer. With the embedding, and with both ends of the model if asked for."""
        key = (grid.tp, grid.ep, len(layers), ends, layers[0].index)
        if ends and key in self._parameters:
            return self._parameters[key]
        spec, model = self._slice(grid.tp), self.space.model
        routed = sum(layer.is_moe for layer in layers) if grid.ep > 1 else 0
        outside = spec.num_attention_parameters + 2 * spec.num_norm_parameters
        sizes = [outside + spec.num_feedforward_parameters(one) for one in layers]
        dense = spec.num_embedding_parameters + sum(sizes)
        dense += spec.vocab * spec.hidden if ends and not spec.tied else 0
        dense -= routed * spec.num_experts * expert_parameters(spec)
        spread = routed * (model.num_experts // grid.ep) * expert_parameters(model)
        block = min(sizes) if len(layers) > 1 and grid.ep == 1 else 0
        if ends:
            self._parameters[key] = dense, spread, block
        return dense, spread, block

    def _kept(self, grid: Grid, mode: str, layers: tuple[LayerSpec, ...]) -> float:
        """Numbers per token that these layers keep of one micro-batch."""
        how = (grid.tp, grid.sequence, grid.cp > 1 and grid.cp_kind, grid.ep > 1)
        key = (*how, mode, layers[0].index, len(layers))
        if key not in self._numbers:
            spec = self._saved(grid.tp)
            keys = 0 if grid.cp > 1 and grid.cp_kind == "ring" else self.seq_len
            parts, routed = grid.tp if grid.sequence else 1, grid.tp if grid.ep > 1 else 1
            is_exchanged = grid.cp > 1 and grid.cp_kind == "ulysses"
            self._numbers[key] = kept_activations(
                spec, layers, mode, keys, parts, routed, is_exchanged, self.stack
            ).between
        return self._numbers[key]
