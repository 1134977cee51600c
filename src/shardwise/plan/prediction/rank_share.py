"""What one rank of a pipeline holds of one tensor-parallel slice of the model. Counts only; bytes are memory.py's, time
is step_time.py's.

Invariant: with tp = pp = 1 the share is the whole model, to the last parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise

from shardwise.spec.model import LayerSpec, ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import SCHEDULES, owners_of, schedule_actions, splits_backward
from shardwise.spec.split import tensor_slice
from shardwise.spec.timeline import peak_in_flight


@dataclass(frozen=True, eq=False)
class Cut:
    """The part that does not depend on the batch. Compared by identity: there is one of each, and results are kept by
    it."""

    spec: ModelSpec  # the slice
    layers: tuple[LayerSpec, ...]
    embedding: int  # parameters before the first layer, if this rank has the first stage
    experts: int  # parameters of one layer's routed experts, where they are spread over ranks; else they are in `spec`
    head: int  # parameters after the last layer, if it has the last stage
    has_last_stage: bool

    @cached_property
    def layer_parameters(self) -> list[int]:
        norms = (4 if self.spec.post_norms else 2) * self.spec.num_norm_parameters
        attention = self.spec.num_attention_parameters + norms
        return [
            attention + self.spec.num_feedforward_parameters(layer) + self._correction * layer.is_moe
            for layer in self.layers
        ]

    @property
    def shape(self) -> tuple[object, ...]:
        """A key that is the same for ranks that hold as much, whichever layers they are."""
        kinds = tuple((layer.is_moe, layer.ffn) for layer in self.layers)
        return self.embedding, self.head, self.has_last_stage, kinds, tuple(self.layer_parameters)

    @property
    def _correction(self) -> int:
        """A slice has all experts, in part; a rank that shares them out has some, whole."""
        if not self.experts:
            return 0
        return self.experts - self.spec.num_experts * expert_parameters(self.spec)

    @cached_property
    def spread_parameters(self) -> int:
        """Of all layers' routed experts: other ranks have the same ones than of the rest."""
        return self.experts * sum(layer.is_moe for layer in self.layers)

    @cached_property
    def num_parameters(self) -> int:
        return self.embedding + sum(self.layer_parameters) + self.head


@dataclass(frozen=True, eq=False)
class RankShare:
    cut: Cut
    stages_in_flight: int  # most activations of a stage held at one time
    weights_waiting: int  # of these, most whose backward has run but for the weights' gradients

    @property
    def spec(self) -> ModelSpec:
        return self.cut.spec

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        return self.cut.layers

    @property
    def embedding(self) -> int:
        return self.cut.embedding

    @property
    def head(self) -> int:
        return self.cut.head

    @property
    def has_last_stage(self) -> bool:
        return self.cut.has_last_stage

    @property
    def layer_parameters(self) -> list[int]:
        return self.cut.layer_parameters

    @property
    def spread_parameters(self) -> int:
        return self.cut.spread_parameters

    @property
    def num_parameters(self) -> int:
        return self.cut.num_parameters


def expert_parameters(spec: ModelSpec) -> int:
    """Returns the number of parameters of one expert."""
    return (3 if spec.gated else 2) * spec.hidden * spec.expert_ffn


def rank_shares(spec: ModelSpec, plan: Plan) -> list[RankShare]:
    """Returns the share of each rank along the pipeline."""
    return [_rank_share(cut, plan, rank) for rank, cut in enumerate(cuts_of(spec, plan))]


def rank_share(spec: ModelSpec, plan: Plan, rank: int) -> RankShare:
    return _rank_share(cuts_of(spec, plan)[rank], plan, rank)


def cuts_of(spec: ModelSpec, plan: Plan) -> tuple[Cut, ...]:
    return cuts(spec, plan.tp, plan.ep, plan.pp, plan.schedule, plan.virtual_stages, plan.split)


def cuts(
    spec: ModelSpec, tp: int, ep: int, pp: int, schedule: str, virtual_stages: int, split: tuple[int, ...]
) -> tuple[Cut, ...]:
    """Returns the cut of each rank along the pipeline."""
    return _cuts(spec, tp, ep, pp, SCHEDULES[schedule].is_v, virtual_stages, split)


def _rank_share(cut: Cut, plan: Plan, rank: int) -> RankShare:
    waiting = _weights_waiting(plan, rank) if not plan.recomputes.is_none else 0
    flight = stages_in_flight(plan.schedule, plan.pp, plan.virtual_stages, plan.num_microbatches, rank)
    return RankShare(cut, flight, waiting)


@lru_cache(1024)
def alike(cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """Returns for each rank the number of the first one that holds as much."""
    first: dict[tuple[object, ...], int] = {}
    return tuple(first.setdefault(cut.shape, rank) for rank, cut in enumerate(cuts))


@lru_cache(1024)
def stages_of_cut(cut: Cut, split: tuple[int, ...]) -> tuple[tuple[LayerSpec, ...], ...]:
    if not split:
        return (cut.layers,)
    mine, starts = {layer.index: layer for layer in cut.layers}, [0, *accumulate(split)]
    ranges = [range(start, stop) for start, stop in pairwise(starts)]
    return tuple(tuple(mine[index] for index in layers) for layers in ranges if layers.start in mine)


def stages_of(share: RankShare, plan: Plan) -> tuple[tuple[LayerSpec, ...], ...]:
    """Returns the rank's layers, stage by stage."""
    return stages_of_cut(share.cut, plan.split)


def numbers_of(layers: Sequence[LayerSpec]) -> range:
    return range(layers[0].index, layers[0].index + len(layers))


@lru_cache(1024)
def _cuts(
    spec: ModelSpec, tp: int, ep: int, pp: int, is_v: bool, virtual_stages: int, split: tuple[int, ...]
) -> tuple[Cut, ...]:
    part = tensor_slice(spec, tp)
    starts = [0, *accumulate(split)] if pp > 1 else [0, spec.num_layers]
    owners = owners_of(is_v, pp, virtual_stages) if pp > 1 else (0,)
    # A tied head uses the embedding: whole models have one table, a pipeline has one at each end.
    has_table = not spec.tied or pp > 1
    cuts = []
    for rank in range(pp):
        mine = [stage for stage, owner in enumerate(owners) if owner == rank]
        indices = [index for stage in mine for index in range(starts[stage], starts[stage + 1])]
        is_first, is_last = 0 in mine, len(owners) - 1 in mine
        cut = Cut(
            spec=part,
            layers=tuple(part.layers[index] for index in indices),
            embedding=part.num_embedding_parameters * is_first,
            experts=spec.num_experts // ep * expert_parameters(spec) if ep > 1 else 0,
            head=(part.num_norm_parameters + part.vocab * part.hidden * has_table) * is_last,
            has_last_stage=is_last,
        )
        cuts.append(cut)
    return tuple(cuts)


def _weights_waiting(plan: Plan, rank: int) -> int:
    if plan.pp == 1 or not splits_backward(plan.schedule):
        return 0
    return weights_waiting(plan.schedule, plan.pp, plan.virtual_stages, plan.num_microbatches)[rank]


ENOUGH = 3
"""Times pp: with more micro-batches of a split backward, the same happens again and again."""


def weights_waiting(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> list[int]:
    """Per rank: most activations whose backward has run but for the weights' gradients. With several stages per rank
    the groups that pass them are alike where pp divides the micro-batches; only then some stand for all (a test
    counts)."""
    if SCHEDULES[schedule].repeats(pp, virtual_stages, num_microbatches) and num_microbatches > ENOUGH * pp:
        num_microbatches = ENOUGH * pp + num_microbatches % pp
    return _waiting(schedule, pp, virtual_stages, num_microbatches)


@lru_cache(1024)
def _waiting(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> list[int]:
    found = []
    for actions in schedule_actions(schedule, pp, virtual_stages, num_microbatches):
        waiting = most = 0
        for kind, _, _ in actions:
            if kind == "I":
                waiting += 1
                most = max(most, waiting)
            elif kind == "W":
                waiting -= 1
        found.append(most)
    return found


def stages_in_flight(schedule: str, pp: int, virtual_stages: int, num_microbatches: int, rank: int) -> int:
    """How many activations of a stage the schedule holds at most; a test counts them in its action lists."""
    if pp == 1:
        return 1
    formula = SCHEDULES[schedule].most_held
    if formula is None:
        return _counted_in_flight(schedule, pp, virtual_stages, num_microbatches)[rank]
    return min(num_microbatches * virtual_stages, formula(pp, virtual_stages, num_microbatches, rank))


@lru_cache(1024)
def _counted_in_flight(schedule: str, pp: int, virtual_stages: int, num_microbatches: int) -> tuple[int, ...]:
    if SCHEDULES[schedule].repeats(pp, virtual_stages, num_microbatches) and num_microbatches > ENOUGH * pp:
        num_microbatches = ENOUGH * pp + num_microbatches % pp
    return peak_in_flight(schedule_actions(schedule, pp, virtual_stages, num_microbatches))
