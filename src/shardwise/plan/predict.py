"""A first prediction of memory and step time, printed beside what was measured.

Memory is counted by what lives at the peak (end of the last backward) on the fullest rank. Time is a sum of parts, each a size
over a measured rate: matrix work, pipeline bubble, data- and tensor-parallel messages, the optimizer's pass over memory. No
torch here. Read next: rank_share.py (what of the model a rank has), activations.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from shardwise.config.schema import AdapterConfig
from shardwise.model.spec import LayerSpec, ModelSpec
from shardwise.plan.activations import head_activation_bytes, kept_activations, logit_bytes, segments
from shardwise.plan.adapter_share import Held, held_by
from shardwise.plan.offloaded import offload_seconds, offloaded
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

MATMUL_SHARE = {"cpu": 0.53, "cuda": 0.55}
"""Share of the bare matmul rate that a whole forward and backward pass reaches.
CPU: fitted to the default run on one two-core machine. CUDA: an assumption; runs on an H200 came out -24 to +21 % off it."""

LAUNCH_SECONDS_PER_LAYER = {"cpu": 3e-3, "cuda": 3.5e-3}
"""Time Python and torch need around one layer's forward and backward operations: the floor for small models.
Fitted to one run each: a two-layer model on a CPU, `tiny` on an H200."""

BLOCKS_HERE = 3
"""With activation offload: one that computes and two on their way to CPU memory (memory/activation_offload.py)."""

SELECTIVE_SHARE = 0.1
"""What selective recomputation runs again, as a share of a forward pass. `tiny` on a CPU: 1 to 3 % of a step."""


FROZEN_FLOPS = 2 / 3
"""Of a step's matrix work, when weights are frozen: no gradients of the weights. Adapters themselves are not counted."""

APART = "never at once"
"""The part of a prediction that is negative: others are not full at the same moment."""

WHOLE = AdapterConfig()
"""All weights are trained."""


@dataclass(frozen=True)
class Rates:
    """What one rank of this machine reaches while all ranks are busy; measured when a run starts."""

    matmul_flops: float  # per second
    memory_bytes: float  # per second, read + written
    all_reduce_bytes: float = float("inf")  # payload per second
    all_reduce_latency: float = 0.0  # seconds per call


@dataclass(frozen=True)
class Prediction:
    memory: dict[str, int]  # bytes per rank by category
    step: dict[str, float]  # seconds by part
    matmul_flops: float  # per second and rank: what the step was predicted from
    elsewhere: dict[str, int] = field(default_factory=dict)  # offloaded bytes per rank: host, disk

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        return sum(self.step.values())

    def to_dict(self) -> dict[str, object]:
        return {
            "memory_bytes": self.memory_bytes,
            "memory": self.memory,
            "elsewhere": self.elsewhere,
            "step_s": self.step_s,
            "step": self.step,
        }


def predict(spec: ModelSpec, plan: Plan, optimizer: str, rates: Rates, adapter: AdapterConfig = WHOLE) -> Prediction:
    memory, step = predict_memory(spec, plan, optimizer, adapter), predict_step(spec, plan, optimizer, rates, adapter)
    return Prediction(memory, step, rates.matmul_flops, predict_elsewhere(spec, plan, optimizer, adapter))


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
    gathered, accumulated = _gathered(whole, compute), 0
    if plan.zero == 0:
        gathered = compute * whole.trained if compute != weight else 0
    elif plan.zero == 1 and plan.num_microbatches > 1:
        accumulated = weight * whole.trained
    elif plan.zero == 3:
        sizes = [_gathered(block, compute) for block in blocks]
        first, *layers, last = sizes
        tied = first + last if share.spec.tied else 0
        # Blocks that are computed again together stay gathered until their backward.
        together = [len(part) for stage in _stages(share, plan) for part in segments(plan.recompute, _numbers(stage))]
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


def _gathered(held: Held, compute: int) -> int:
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
    of_stages = _stages(share, plan)
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


def _stages(share: RankShare, plan: Plan) -> list[list[LayerSpec]]:
    """The rank's layers, stage by stage."""
    if plan.pp == 1:
        return [list(share.layers)]
    mine = {layer.index: layer for layer in share.layers}
    ranges = [plan.layers_of(stage) for stage in range(plan.num_stages)]
    return [[mine[index] for index in layers] for layers in ranges if layers.start in mine]


def _numbers(layers: list[LayerSpec]) -> range:
    return range(layers[0].index, layers[0].index + len(layers))


def _repeated_work(share: RankShare, plan: Plan) -> float:
    """Forward passes that backward runs again, as a share of the rank's one. The last product of a group of blocks is not needed."""
    if plan.recompute in ("none", "selective"):
        return SELECTIVE_SHARE * (plan.recompute == "selective")
    sizes = {layer.index: size for layer, size in zip(share.layers, share.layer_parameters, strict=True)}
    again = 0
    for layers in _stages(share, plan):
        for part in segments(plan.recompute, _numbers(layers)):
            last = layers[part[-1] - layers[0].index]
            again += sum(sizes[index] for index in part) - (0 if last.is_moe else last.ffn * share.spec.hidden)
    return again / (sum(sizes.values()) + share.head)


def predict_step(
    spec: ModelSpec, plan: Plan, optimizer: str, rates: Rates, adapter: AdapterConfig = WHOLE
) -> dict[str, float]:
    """Seconds of the slowest rank. Messages between pipeline stages are not counted: they travel while others compute."""
    slowest = max(rank_shares(spec, plan), key=lambda share: share.work)
    blocks = held_by(slowest, spec, adapter)
    held = sum(blocks[1:], blocks[0])
    # The micro-batches of a pipeline have one shape, so the last one is filled up; without one it may be smaller.
    rows = plan.rows_per_rank if plan.pp == 1 else plan.num_microbatches * plan.micro_batch
    flops = rows * plan.seq_len * spec.flops_per_token(plan.seq_len) * slowest.work / (plan.tp * plan.cp)
    flops *= FROZEN_FLOPS if adapter.kind != "none" else 1.0
    launches = len(slowest.layers) * plan.num_microbatches * LAUNCH_SECONDS_PER_LAYER[plan.device]
    compute = max(flops / (rates.matmul_flops * MATMUL_SHARE[plan.device]), launches)
    again = _repeated_work(slowest, plan) * compute / 3  # a forward pass is a third of the work
    # Read gradient and weight, write weight, read and write each state; + 2: the norm for clipping, and its scaling.
    passed = 5 * WEIGHT_BYTES[plan.precision] + 2 * state_bytes(optimizer, plan.precision)
    moved = passed * held.trained / plan.state_shards
    step = {"compute": compute, "optimizer": moved / rates.memory_bytes}
    if again:
        step["recompute"] = again
    if moving := offload_seconds(held.trained / plan.state_shards, plan):
        step["offload"] = moving
    if plan.pp > 1:
        step["bubble"] = (compute + again) * bubble_share(plan)
    if plan.dp * plan.cp > 1:
        step["data-parallel"] = _data_parallel_seconds(slowest, held, plan, rates)
    if plan.tp > 1:
        # Two sums per layer, forward and backward. Sequence parallelism cuts each in two halves of the same total.
        message = plan.micro_batch * plan.seq_len // plan.cp * spec.hidden * COMPUTE_BYTES[plan.precision]
        # A repeated forward has its sums too, but for the one after its last product.
        groups = [part for layers in _stages(slowest, plan) for part in segments(plan.recompute, _numbers(layers))]
        repeated = sum(2 * len(part) - 1 for part in groups)
        sums = (4 * len(slowest.layers) + repeated) * plan.num_microbatches
        step["tensor-parallel"] = sums * (rates.all_reduce_latency + message / rates.all_reduce_bytes)
    if plan.ep > 1:
        # Every chosen copy of a token travels there and back, forward and backward: half of what an all-reduce moves.
        routed = sum(layer.is_moe for layer in slowest.layers) * plan.num_microbatches
        tokens = plan.micro_batch * plan.seq_len // (plan.cp * plan.tp) * spec.experts_per_token
        payload = tokens * spec.hidden * COMPUTE_BYTES[plan.precision] * (plan.ep - 1) / plan.ep
        step["expert-parallel"] = 4 * routed * (rates.all_reduce_latency + payload / 2 / rates.all_reduce_bytes)
    return step


def bubble_share(plan: Plan) -> float:
    """Idle time over work, for stages of equal cost whose backward splits into halves as long as a forward."""
    stages = plan.virtual_stages
    filled = {"gpipe": 1, "1f1b": 1, "interleaved": stages, "zero-bubble": 3 * stages, "zbv": 6}[plan.schedule]
    return (plan.pp - 1) / (filled * plan.num_microbatches)


def _data_parallel_seconds(share: RankShare, held: Held, plan: Plan, rates: Rates) -> float:
    """An all-reduce is a reduction to the owners and a gathering from them; ZeRO does the two apart, and how often differs."""
    unmoved = share.spread_parameters if plan.expert_copies == 1 else 0
    is_frozen = held.trained < share.num_parameters
    weight = WEIGHT_BYTES[plan.precision] * (held.trained - (0 if is_frozen else unmoved))
    compute = _gathered(held, COMPUTE_BYTES[plan.precision]) - COMPUTE_BYTES[plan.precision] * unmoved
    if plan.zero == 0:
        return rates.all_reduce_latency + weight / rates.all_reduce_bytes
    reductions = 1 if plan.zero == 1 else plan.num_microbatches
    gathers = 2 * plan.num_microbatches if plan.zero == 3 else 1  # stage 3: for forward, and again for backward
    moved = (reductions * weight + gathers * compute) / 2
    calls = (reductions + gathers) / 2 * (len(share.layers) + 2)  # one per block and end
    if plan.replicate > 1:  # the owners of one shard meet once, at the last micro-batch
        moved += weight / plan.state_shards
        calls += 1
    return calls * rates.all_reduce_latency + moved / rates.all_reduce_bytes
