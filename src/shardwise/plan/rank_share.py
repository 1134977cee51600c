"""What one rank of a pipeline holds of one tensor-parallel slice of the model. Counts only; bytes are memory.py's, time is step_time.py's.

Invariant: with tp = pp = 1 the share is the whole model, to the last parameter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.model.spec import LayerSpec, ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.schedules import schedule_actions, splits_backward, stage_owners
from shardwise.plan.split import estimated_costs


@dataclass(frozen=True)
class RankShare:
    spec: ModelSpec  # the slice
    layers: tuple[LayerSpec, ...]
    embedding: int  # parameters before the first layer, if this rank has the first stage
    experts: int  # parameters of one layer's routed experts, where they are spread over ranks; else they are in `spec`
    head: int  # parameters after the last layer, if it has the last stage
    has_last_stage: bool
    work: float  # share of the model's FLOPs, before tensor parallelism
    stages_in_flight: int  # most activations of a stage held at one time
    weights_waiting: int  # of these, most whose backward has run but for the weights' gradients

    @property
    def layer_parameters(self) -> list[int]:
        norms = (4 if self.spec.post_norms else 2) * self.spec.num_norm_parameters
        attention = self.spec.num_attention_parameters + norms
        return [
            attention + self.spec.num_feedforward_parameters(layer) + self._correction * layer.is_moe
            for layer in self.layers
        ]

    @property
    def _correction(self) -> int:
        """A slice has all experts, in part; a rank that shares them out has some, whole."""
        if not self.experts:
            return 0
        return self.experts - self.spec.num_experts * expert_parameters(self.spec)

    @property
    def spread_parameters(self) -> int:
        """Of all layers' routed experts: other ranks have the same ones than of the rest."""
        return self.experts * sum(layer.is_moe for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        return self.embedding + sum(self.layer_parameters) + self.head


def expert_parameters(spec: ModelSpec) -> int:
    """Of one expert."""
    return (3 if spec.gated else 2) * spec.hidden * spec.expert_ffn


def rank_shares(spec: ModelSpec, plan: Plan) -> list[RankShare]:
    """One per rank along the pipeline."""
    return [_rank_share(spec, plan, rank) for rank in range(plan.pp)]


def tensor_slice(spec: ModelSpec, tp: int) -> ModelSpec:
    """The largest slice that one of `tp` ranks holds, as a model of its own: whole heads, some channels, some of the
    vocabulary. Norms, routers, learned positions and the down-projections of latent attention are not cut."""
    if tp == 1:
        return spec
    heads = spec.num_heads // tp
    return replace(
        spec,
        num_heads=heads,
        num_kv_heads=heads if spec.is_latent else -(-spec.num_kv_heads // tp),
        head_dim=spec.head_dim,
        ffn=-(-spec.ffn // tp),
        expert_ffn=-(-spec.expert_ffn // tp),
        vocab=-(-spec.vocab // tp),
    )


def _rank_share(spec: ModelSpec, plan: Plan, rank: int) -> RankShare:
    part = tensor_slice(spec, plan.tp)
    costs, first, last = estimated_costs(spec, plan.seq_len)
    if plan.pp == 1:
        indices, is_first, is_last = list(range(spec.num_layers)), True, True
    else:
        owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages)
        mine = [stage for stage, owner in enumerate(owners) if owner == rank]
        indices = [index for stage in mine for index in plan.layers_of(stage)]
        is_first, is_last = 0 in mine, plan.num_stages - 1 in mine
    # A tied head uses the embedding: whole models have one table, a pipeline has one at each end.
    has_table = not spec.tied or plan.pp > 1
    work = sum(costs[index] for index in indices) + first * is_first + last * is_last
    return RankShare(
        spec=part,
        layers=tuple(part.layers[index] for index in indices),
        embedding=part.num_embedding_parameters * is_first,
        experts=spec.num_experts // plan.ep * expert_parameters(spec) if plan.ep > 1 else 0,
        head=(part.num_norm_parameters + part.vocab * part.hidden * has_table) * is_last,
        has_last_stage=is_last,
        work=work / (sum(costs) + first + last),
        stages_in_flight=_stages_in_flight(plan, rank),
        weights_waiting=_weights_waiting(plan, rank) if plan.recompute != "none" else 0,
    )


def _weights_waiting(plan: Plan, rank: int) -> int:
    if plan.pp == 1 or not splits_backward(plan.schedule):
        return 0
    waiting = most = 0
    for action in schedule_actions(plan.schedule, plan.pp, plan.virtual_stages, plan.num_microbatches)[rank]:
        waiting += {"I": 1, "W": -1}.get(action.kind, 0)
        most = max(most, waiting)
    return most


def _stages_in_flight(plan: Plan, rank: int) -> int:
    """How many activations of a stage the schedule holds at most; a test counts them in its action lists."""
    pp, stages, microbatches = plan.pp, plan.virtual_stages, plan.num_microbatches
    if pp == 1:
        return 1
    group = -(-microbatches // max(1, microbatches // pp))  # micro-batches that pass a stage before the next takes over
    most = {
        "gpipe": microbatches * stages,
        "1f1b": pp - rank,
        "interleaved": (stages - 1) * group + 2 * (pp - 1 - rank) + 1,
        "zero-bubble": (stages - 1) * group + pp,
        "zbv": 2 * pp,
    }
    return min(microbatches * stages, most[plan.schedule])
