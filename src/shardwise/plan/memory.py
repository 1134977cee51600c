"""Memory of a rank at its peak, by what lives there. No torch.

Counted at the end of the last backward on the fullest rank. Read next: rank_share.py (what of the model a rank has), activations.py.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.config.schema import AdapterConfig
from shardwise.model.spec import LayerSpec, ModelSpec
from shardwise.plan.activations import head_activation_bytes, kept_activations, logit_bytes, segments
from shardwise.plan.adapter_share import Held, held_by
from shardwise.plan.job import WHOLE
from shardwise.plan.offloaded import offloaded
from shardwise.plan.plan import Plan
from shardwise.plan.rank_share import RankShare, rank_shares

WEIGHT_BYTES = {"fp64": 8, "fp32": 4, "bf16": 4, "fp16": 4, "fp8": 4, "bf16-true": 2, "fp16-true": 2}
"""Per number of weights, gradients and optimizer state."""

COMPUTE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "bf16-true": 2, "fp16-true": 2}
"""Per number of activations and of parameters while they are used."""

STATES_PER_PARAMETER = {"adamw": 2, "adam": 2, "sgd": 0, "momentum": 1, "adagrad": 1, "rmsprop": 1, "adamw8bit": 2}
"""Extra tensors of the parameter's size that each optimizer keeps."""

STATE_BYTES = WEIGHT_BYTES | {"fp16-true": 4}
"""Per number of optimizer state. Adam's second moment would vanish in fp16."""

LOW_BIT_BYTES = 1 + 4 / 256
"""Per number of 8-bit state: a code, and a block's share of its scale."""

PROCESS_BYTES = {"cpu": 305 * 2**20, "cuda": 0}
"""What a rank holds besides tensors: interpreter, torch and its math libraries. On CUDA only tensors are counted."""

ALLOCATOR_SHARE = {"cpu": 0.45, "cuda": 0.03}
"""Backward's own temporaries, and on a CPU what malloc keeps in holes; as a share of the activations.
CPU: fitted to `tiny` with micro-batches of 1 and 8 on one machine. CUDA: what was left over in six jobs on an H200, docs/benchmarks.md."""

LOSS_TEMPORARIES = {"cpu": 0, "cuda": 2}
"""Copies of a chunk's logits that the loss has besides the one it keeps: gradients on both sides of the softmax. On a CPU the share above
was fitted with them inside."""

BLOCKS_HERE = 3
"""With activation offload: one that computes and two on their way to CPU memory (memory/activation_offload.py)."""

APART = "never at once"
"""The part of a prediction that is negative: others are not full at the same moment."""


def predict_memory(spec: ModelSpec, plan: Plan, optimizer: str, adapter: AdapterConfig = WHOLE) -> dict[str, int]:
    """Bytes of the fullest rank at the peak."""
    held = ((share, held_by(share, spec, adapter)) for share in rank_shares(spec, plan))
    return max((_rank_memory(*one, plan, optimizer) for one in held), key=lambda m: sum(m.values()))


def predict_elsewhere(spec: ModelSpec, plan: Plan, optimizer: str, adapter: AdapterConfig = WHOLE) -> dict[str, int]:
    """Bytes of the fullest rank that are not on its device: `host`, in CPU memory beside a GPU; `disk`."""
    if plan.offload == "none":
        return {"host": 0, "disk": 0}
    stays = replace(plan, offload="none", offload_to="cpu")
    shares = ((share, held_by(share, spec, adapter)) for share in rank_shares(spec, plan))
    found = [offloaded(_rank_memory(*one, stays, optimizer), one[0], plan)[1] for one in shares]
    return {name: max(parts[name] for parts in found) for name in ("host", "disk")}


def state_bytes(optimizer: str, precision: str) -> float:
    """Of optimizer state per parameter. With adamw8bit, small tensors and odd ones keep four times as much."""
    size = LOW_BIT_BYTES if optimizer.endswith("8bit") else STATE_BYTES[precision]
    return STATES_PER_PARAMETER[optimizer] * size


def _rank_memory(share: RankShare, blocks: list[Held], plan: Plan, optimizer: str) -> dict[str, int]:
    """What a rank really holds, by ZeRO stage (P parameters, N shards; fp32 weights, Adam):

    0   16 P                            gradients live inside the all-reduce buckets
    1   16 P / N + P gathered           and all of the gradients, when they accumulate over micro-batches
    2   16 P / N + P gathered           every micro-batch's gradients go to their owners at once
    3   16 P / N + two blocks gathered  a tied embedding stays gathered as well

    Gathered parameters are in the format of the computation; bf16 over fp32 weights needs that copy at stage 0 too. What is
    frozen beside adapters is kept in that format at once, and has neither gradients nor states.
    """
    weight, compute = WEIGHT_BYTES[plan.precision], COMPUTE_BYTES[plan.precision]
    whole = sum(blocks[1:], blocks[0])
    is_frozen = whole.trained < share.num_parameters
    spread = share.spread_parameters * (compute if is_frozen else weight)
    full = weight * whole.trained + compute * whole.frozen + whole.packed_bytes
    own = -(-(full - spread) // plan.state_shards) + -(-spread // plan.expert_shards)
    own_trained = -(-weight * whole.trained // plan.state_shards) if is_frozen else own
    gathered, accumulated = gathered_bytes(whole, compute), 0
    if plan.zero == 0:
        gathered = compute * whole.trained if compute != weight else 0
    elif plan.zero == 1 and plan.num_microbatches > 1:
        accumulated = weight * whole.trained
    elif plan.zero == 3:
        sizes = [gathered_bytes(block, compute) for block in blocks]
        first, *layers, last = sizes
        tied = first + last if share.spec.tied else 0
        # Blocks that are computed again together stay gathered until their backward.
        together = [
            len(part) for stage in stages_of(share, plan) for part in segments(plan.recompute, numbers_of(stage))
        ]
        gathered = tied + sum(sorted(layers if tied else sizes)[-max([2, *together]) :])
    gathered += compute * whole.largest
    activations = _activations(share, plan)
    parts = {
        "weights": own,
        "gathered": gathered,
        "gradients": own_trained + accumulated,
        "optimizer": int(own_trained / weight * state_bytes(optimizer, plan.precision)),
        "activations": activations,
        "allocator": int(ALLOCATOR_SHARE[plan.device] * activations),
        "process": PROCESS_BYTES[plan.device],
    }
    parts |= offloaded(parts, share, plan)[0] if plan.offload != "none" else {}
    return parts | {APART: _apart(parts, max(block.trained for block in blocks), plan)}


def _apart(parts: dict[str, int], largest_group: int, plan: Plan) -> int:
    """What the parts add up to beyond the peak, as a negative number. With one micro-batch per step gradients grow while backward lets go
    of activations, and of gathered parameters: the peak is at one of its ends. At the second, FSDP2 still has the last group, its gradient
    and the same in the format of sums. CPU: the allocator's share was fitted to the plain sum, which stays."""
    holds_buckets = plan.zero == 0 and plan.dp * plan.cp > 1 and not plan.uses_fsdp
    if plan.device == "cpu" or plan.num_microbatches > 1 or plan.pp > 1 or holds_buckets:
        return 0
    first = parts["gathered"] + parts["activations"] + parts["allocator"]
    last = parts["gradients"]
    if plan.uses_fsdp:
        last += largest_group * (2 * COMPUTE_BYTES[plan.precision] + WEIGHT_BYTES[plan.precision])
        last += parts["gathered"] if plan.zero == 3 else 0
    return min(0, max(first, last) - first - parts["gradients"])


def gathered_bytes(held: Held, compute: int) -> int:
    return compute * (held.trained + held.frozen) + held.packed_bytes


def _activations(share: RankShare, plan: Plan) -> int:
    """Of every stage in flight; a loss is followed by its backward at once, except by gpipe. What is computed again comes on top, when
    the head's logits are gone; a split backward holds it until the weights have their gradients."""
    size, token_parts = COMPUTE_BYTES[plan.precision], plan.tp if plan.sequence else 1
    tokens = plan.micro_batch * plan.seq_len // plan.cp
    kind, routed_parts = plan.cp_kind if plan.cp > 1 else "", plan.tp if plan.ep > 1 else 1
    keys = 0 if kind == "ring" else plan.seq_len
    # CUDA's RMSNorm is one kernel that keeps its input alone, as LayerNorm does everywhere.
    spec = share.spec.with_overrides({"norm": "layer"}) if plan.device == "cuda" else share.spec
    of_stages = stages_of(share, plan)
    stages = [
        kept_activations(spec, layers, plan.recompute, keys, token_parts, routed_parts, kind == "ulysses")
        for layers in of_stages
    ]
    held = tokens * sum(stage.between for stage in stages) * size * share.stages_in_flight // plan.virtual_stages
    if plan.activation_offload:
        here = max(
            stage.between * min(BLOCKS_HERE, len(layers)) // len(layers)
            for stage, layers in zip(stages, of_stages, strict=True)
        )
        held = tokens * here * size
    repeated = tokens * max(stage.repeated for stage in stages) * size * max(1, share.weights_waiting)
    head = 0
    if share.has_last_stage:
        losses = plan.num_microbatches if plan.pp > 1 and plan.schedule == "gpipe" else 1
        head = losses * head_activation_bytes(spec, tokens, size, token_parts)
        head += LOSS_TEMPORARIES[plan.device] * logit_bytes(spec, tokens, size)
        if spec.tied and plan.uses_fsdp:  # the head's part of that gradient waits for the embedding's
            head += size * share.embedding
    return held + max(head, repeated)


def stages_of(share: RankShare, plan: Plan) -> list[list[LayerSpec]]:
    """The rank's layers, stage by stage."""
    if plan.pp == 1:
        return [list(share.layers)]
    mine = {layer.index: layer for layer in share.layers}
    ranges = [plan.layers_of(stage) for stage in range(plan.num_stages)]
    return [[mine[index] for index in layers] for layers in ranges if layers.start in mine]


def numbers_of(layers: list[LayerSpec]) -> range:
    return range(layers[0].index, layers[0].index + len(layers))
