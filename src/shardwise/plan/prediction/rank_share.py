"""What one rank of a pipeline holds of one tensor-parallel slice of the model. Counts only; bytes are memory.py's, time
is step_time.py's.

Invariant: with tp = pp = 1 the share is the whole model, to the last parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from operator import mul

from shardwise.spec.model import LayerSpec, ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import SCHEDULES, enough_actions, owners_of, splits_backward
from shardwise.spec.split import tensor_slice
from shardwise.spec.timeline import fullest_moments, peak_in_flight


@dataclass(frozen=True, eq=False)
class RankShare:
    """The part of the model that a rank holds, whatever the batch. Compared by identity: there is one of each, and
    results are kept by it."""

    rank: int  # along the pipeline
    spec: ModelSpec  # the slice
    layers: tuple[LayerSpec, ...]
    embedding: int  # parameters before the first layer, if this rank has the first stage
    experts: int  # parameters of one layer's routed experts, where they are spread over ranks; else they are in `spec`
    head: int  # parameters after the last layer, if it has the last stage
    has_last_stage: bool

    @cached_property
    def layer_parameters(self) -> list[int]:
        """The number of parameters of each layer."""
        norms = (4 if self.spec.post_norms else 2) * self.spec.num_norm_parameters
        attention = self.spec.num_attention_parameters + norms
        # A slice has all experts, in part; a rank that shares them out has some, whole.
        correction = self.experts - self.spec.num_experts * expert_parameters(self.spec) if self.experts else 0
        return [
            attention + self.spec.num_feedforward_parameters(layer) + correction * layer.is_moe for layer in self.layers
        ]

    @cached_property
    def spread_parameters(self) -> int:
        """The number of parameters of all layers' routed experts, which are on other ranks than the rest."""
        return self.experts * sum(layer.is_moe for layer in self.layers)

    @cached_property
    def num_parameters(self) -> int:
        """The number of parameters of the rank's layers and ends."""
        return self.embedding + sum(self.layer_parameters) + self.head

    def in_flight(self, plan: Plan) -> int:
        """Returns how many activations of a stage this rank holds at most."""
        return stages_in_flight(plan.schedule, plan.pp, plan.virtual_stages, plan.num_microbatches, self.rank)

    def kept_at_once(self, plan: Plan, kept: Sequence[int]) -> int:
        """Returns the most that this rank keeps at once, given what one activation of each of its stages keeps."""
        if min(kept) == max(kept):
            return kept[0] * self.in_flight(plan)
        moments = fullest_moments(plan.schedule, plan.pp, plan.virtual_stages, plan.num_microbatches, self.rank)
        return max(sum(map(mul, kept, moment)) for moment in moments)

    def weights_waiting(self, plan: Plan) -> int:
        """Returns how many of these this rank holds at most whose backward has run but for the weights' gradients.
        Nobody asks where nothing is computed again for them."""
        if plan.pp == 1 or plan.recomputes.is_none or not splits_backward(plan.schedule):
            return 0
        return most_held(plan.schedule, plan.pp, plan.virtual_stages, plan.num_microbatches)[1][self.rank]


def expert_parameters(spec: ModelSpec) -> int:
    """Returns the number of parameters of one expert."""
    return (3 if spec.gated else 2) * spec.hidden * spec.expert_ffn


def rank_shares(spec: ModelSpec, plan: Plan) -> tuple[RankShare, ...]:
    """Returns the share of each rank along the pipeline."""
    is_v = SCHEDULES[plan.schedule].is_v
    return shares_of(spec, plan.tp, plan.ep, plan.pp, is_v, plan.virtual_stages, plan.split)


@lru_cache(1024)
def shares_of(
    spec: ModelSpec, tp: int, ep: int, pp: int, is_v: bool, virtual_stages: int, split: tuple[int, ...]
) -> tuple[RankShare, ...]:
    """Returns the share of each rank along the pipeline. `is_v`: stages go down the ranks and up again."""
    part = tensor_slice(spec, tp)
    starts = [0, *accumulate(split)] if pp > 1 else [0, spec.num_layers]
    owners = owners_of(is_v, pp, virtual_stages) if pp > 1 else (0,)
    # A tied head uses the embedding: whole models have one table, a pipeline has one at each end.
    has_table = not spec.tied or pp > 1
    found = []
    for rank in range(pp):
        mine = [stage for stage, owner in enumerate(owners) if owner == rank]
        is_first, is_last = 0 in mine, len(owners) - 1 in mine
        share = RankShare(
            rank=rank,
            spec=part,
            layers=tuple(layer for stage in mine for layer in part.layers[starts[stage] : starts[stage + 1]]),
            embedding=part.num_embedding_parameters * is_first,
            experts=spec.num_experts // ep * expert_parameters(spec) if ep > 1 else 0,
            head=(part.num_norm_parameters + part.vocab * part.hidden * has_table) * is_last,
            has_last_stage=is_last,
        )
        found.append(share)
    return tuple(found)


@lru_cache(1024)
def alike(shares: tuple[RankShare, ...]) -> tuple[int, ...]:
    """Returns for each rank the number of the first one that holds as much, whichever layers they are."""
    first: dict[object, int] = {}
    ends = ((share.embedding, share.head, share.has_last_stage) for share in shares)
    layers = (tuple((layer.is_moe, layer.ffn) for layer in share.layers) for share in shares)
    sizes = (tuple(share.layer_parameters) for share in shares)
    return tuple(first.setdefault(kind, rank) for rank, kind in enumerate(zip(ends, layers, sizes, strict=True)))


@lru_cache(1024)
def stages_of(share: RankShare, split: tuple[int, ...]) -> tuple[tuple[LayerSpec, ...], ...]:
    """Returns the rank's layers, stage by stage."""
    if not split:
        return (share.layers,)
    mine, starts = {layer.index: layer for layer in share.layers}, [0, *accumulate(split)]
    ranges = [range(start, stop) for start, stop in pairwise(starts)]
    return tuple(tuple(mine[index] for index in layers) for layers in ranges if layers.start in mine)


def numbers_of(layers: Sequence[LayerSpec]) -> range:
    """Returns the numbers of neighbouring layers in the model."""
    return range(layers[0].index, layers[0].index + len(layers))


def stages_in_flight(schedule: str, pp: int, virtual_stages: int, num_microbatches: int, rank: int) -> int:
    """Returns how many activations of a stage a rank holds at most; a test counts them in the action lists."""
    if pp == 1:
        return 1
    formula = SCHEDULES[schedule].most_held
    if formula is None:
        return most_held(schedule, pp, virtual_stages, num_microbatches)[0][rank]
    return min(num_microbatches * virtual_stages, formula(pp, virtual_stages, num_microbatches, rank))


WAITING = {"F": 0, "B": 0, "I": 1, "W": -1}


@lru_cache(1024)
def most_held(
    schedule: str, pp: int, virtual_stages: int, num_microbatches: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns two maxima for each rank from its list of actions: activations that it holds, and those of them whose
    backward has run but for the weights' gradients. With several stages per rank the groups that pass them are alike
    where pp divides the micro-batches; only then some stand for all (a test counts)."""
    lists = enough_actions(schedule, pp, virtual_stages, num_microbatches)
    return peak_in_flight(lists), tuple(max(accumulate(WAITING[action.kind] for action in mine)) for mine in lists)
