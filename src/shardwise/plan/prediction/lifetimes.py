"""What a rank holds at the moments when it may hold most, and which of them it is. Bytes, no torch.

    forward     all micro-batches of the schedule are in flight, and on the last stage the loss is computed
    backward    a block is computed again; those after it are gone
    end         the last backward is over: gradients are complete, activations gone

Invariant: the parts of a `StageMemory` add up to its peak. Each part is the most that its name ever holds; what the
parts add up to beyond the peak is a negative part, `never at once`. Read next: states.py, activations.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from shardwise.plan.prediction.activations import (
    Kept,
    TokenShare,
    fused_chunks,
    has_chunks,
    head_activation_bytes,
    kept_activations,
    last_norm_bytes,
    logit_bytes,
    segments,
)
from shardwise.plan.prediction.calibration import measured
from shardwise.plan.prediction.rank_share import RankShare, numbers_of, stages_of
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.states import COMPUTE_BYTES, WEIGHT_BYTES, Groups, RankStates, offloaded, states_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import StageMemory
from shardwise.spec.schedules import SCHEDULES

PROCESS_BYTES = measured("process_bytes")
WORKSPACE_BYTES = measured("workspace_bytes")
ALLOCATOR_SHARE = measured("allocator_share")

LOSS_TEMPORARIES = {"cpu": 0, "cuda": 2}
"""Copies of a chunk's logits that the loss has besides the one it keeps: gradients on both sides of the softmax. On a
CPU the share above was fitted with them inside."""

BLOCKS_HERE = 3
"""With activation offload: one that computes and two on their way to CPU memory (memory/activation_offload.py)."""

END = "end of the last backward"

APART = "never at once"
"""The part of a prediction that is negative: others are not full at the same moment."""


@dataclass(frozen=True)
class Activations:
    """Bytes of activations on one rank, at the moment in which it has most of them."""

    held: int  # of all stages in flight
    head: int  # of the loss on top, if this rank has it
    repeated: int  # what backward computes again on top
    working: int  # gradients on their way through that block
    at: int  # the layer where that is most
    away: int = 0  # in pinned CPU memory, with activation offload

    @property
    def most(self) -> int:
        return self.held + max(self.head, self.repeated)


def rank_memory(share: RankShare, groups: Groups, plan: Plan, optimizer: str, stack: Stack) -> StageMemory:
    """Returns the bytes of a rank at its peak, by part, and the moment of it."""
    states = states_of(share, groups, plan, optimizer, stack)
    stack = beside_adapters(stack, groups)
    ends = groups.blocks[0 if share.spec.tied and plan.pp == 1 else -1]
    activations = activations_of(share, plan, stack, trains_head=ends.trained > 0)
    parts = {
        **state_parts(states),
        "activations": activations.most,
        "allocator": int(ALLOCATOR_SHARE[plan.device] * activations.most),
        "process": PROCESS_BYTES[plan.device],
    }
    parts |= offloaded(parts, share, plan)[0] if plan.offload != "none" else {}
    # CPU: the allocator's share was fitted to the plain sum, which stays.
    if plan.device == "cpu":
        return StageMemory(parts | {APART: 0}, END)
    passing = parts["gathered"] + parts["gradients"] + parts["activations"]  # what is not there at every moment
    moments = _moments(share, groups, plan, states, activations, parts)
    moment = max(moments, key=lambda name: moments[name])
    parts["allocator"] = max(0, moments[moment] - passing) + WORKSPACE_BYTES[plan.device]
    parts[APART] = min(0, moments[moment] - passing)
    return StageMemory(stack.reserved(parts, share.spec, plan, COMPUTE_BYTES[plan.precision]), moment)


def state_parts(states: RankStates) -> dict[str, int]:
    """Returns the bytes of a rank by category, without its activations and with nothing offloaded."""
    names = ("weights", "gathered", "gradients", "optimizer")
    return {name: getattr(states, name) for name in names}


def while_forward(states: RankStates, parts: Mapping[str, int], held: int) -> int:
    """Returns the bytes that are there when the activations of all micro-batches in flight are, beside weights and
    optimizer state."""
    return (parts["gradients"] if states.accumulated else 0) + parts["gathered"] + held


def beside_adapters(stack: Stack, groups: Groups) -> Stack:
    """Returns the stack as adapters leave it: they have matmuls of their own, and read inputs in 16 bits."""
    if stack.side_by_side and groups.apart:
        stack = replace(stack, side_by_side=tuple(word for word in stack.side_by_side if word not in groups.apart))
    return replace(stack, fp8_least=0) if stack.fp8_least and groups.whole.frozen else stack


def _moments(
    share: RankShare, groups: Groups, plan: Plan, states: RankStates, activations: Activations, parts: dict[str, int]
) -> dict[str, int]:
    """Returns the bytes of gathered parameters, gradients, activations and temporaries by moment."""
    gathered, complete, held = parts["gathered"], parts["gradients"], activations.held
    so_far = complete if states.accumulated else 0
    flight = share.in_flight(plan)
    before = held * (flight - 1) // flight  # of the micro-batches after the one in backward
    again = activations.repeated + activations.working
    forward, others = "loss" if share.has_last_stage else "end of forward", f", {flight} in flight" * (flight > 1)
    moments = {forward + others: while_forward(states, parts, held) + activations.head}
    if activations.repeated:
        moments[f"backward of layer {activations.at}{others}"] = so_far + gathered + held + again
    if not states.reduced:
        # What a backward leaves is added up when it is over: the activations of its micro-batch are gone by then.
        moments["end of a backward"] = complete + before + states.arriving
        if plan.copies and not states.accumulated:
            for name, size in _while_gradients_stay(share, groups, plan, held, again, complete).items():
                moments[name] = max(moments.get(name, 0), gathered + size)
    else:
        moments |= _while_reducing(share, groups, plan, states, activations, parts, before)
    moments["optimizer step"] = complete + states.stepping
    return moments


def _while_gradients_stay(
    share: RankShare, groups: Groups, plan: Plan, held: int, again: int, complete: int
) -> dict[str, int]:
    """Returns the bytes at the two ends of a backward that leaves its gradients where it makes them, in the format of
    the computation."""
    size, (embedding, block, *_, head) = COMPUTE_BYTES[plan.precision], (group.trained for group in groups.blocks)
    by_head = embedding if share.spec.tied else head  # a tied table's waits for the embedding's
    to_come = block + (0 if share.spec.tied else embedding)
    layer, first, last = held // len(share.layers), share.layers[0].index, share.layers[-1].index
    moments = {f"backward of layer {last}": held + size * by_head + again}
    return moments | {f"backward of layer {first}": complete - size * to_come + layer + again}


def _while_reducing(
    share: RankShare,
    groups: Groups,
    plan: Plan,
    states: RankStates,
    activations: Activations,
    parts: dict[str, int],
    before: int,
) -> dict[str, int]:
    """Returns the bytes at the moments of a backward in which FSDP2 reduces. It has a group's gradient as it was
    computed, in the format of sums, and what comes out; the second of them stays until the next group is reduced.
    `before`: activations of other micro-batches in flight; stages 0 and 1 of a pipeline reduce in the last backward,
    when there are none."""
    one, others = activations.held - before, before if plan.stage.reduces_every_microbatch else 0
    compute, weight = COMPUTE_BYTES[plan.precision], WEIGHT_BYTES[plan.precision]
    embedding, *_, block, head = (group.trained for group in groups.blocks)
    gathered, complete = parts["gathered"], parts["gradients"]
    kept = 0.0 if states.accumulated else weight / plan.state_shards  # of a gradient, once its group is reduced
    dropped = 0 if plan.stage.drops_parameters else compute  # of parameters, then
    waiting = compute * embedding if share.spec.tied and plan.pp == 1 else 0  # a tied table's gradient by the head
    full = others + one + gathered + (complete if states.accumulated else 0)
    after_head = full + head * (kept - dropped) + waiting
    layer, first, last = one / len(share.layers), share.layers[0].index, share.layers[-1].index
    again, count, repeated = activations.working + activations.repeated, 1, float(activations.repeated)
    if plan.recomputes.in_groups:  # the first group of blocks is computed again together; it may be smaller than others
        sizes = [len(part) for part in segments(plan.recompute, numbers_of(stages_of(share, plan.split)[0]))]
        count, repeated = sizes[0], repeated * sizes[0] / max(sizes)
    to_come = embedding + count * block
    left = gathered if plan.stage.drops_parameters else compute * to_come
    by_then = others + complete - kept * to_come + weight * block + left + layer
    moments = {
        "reduction of the head": full + head * (compute + weight + kept),
        f"backward of layer {last}": after_head + weight * head + again,
        f"reduction of layer {last}": after_head - layer + block * (compute + weight + kept),
        f"backward of layer {first + count - 1}": by_then + activations.working + repeated + waiting,
        END: others + complete + states.reduced + (gathered if plan.stage.drops_parameters else 0),
    }
    return {name: int(size) for name, size in moments.items()}


def activations_of(share: RankShare, plan: Plan, stack: Stack, trains_head: bool = True) -> Activations:
    """Returns the bytes of activations of every stage in flight; a loss is followed by its backward at once, except by
    gpipe. What is computed again comes on top, when the head's logits are gone; a split backward holds it until the
    weights have their gradients."""
    size, token_parts = COMPUTE_BYTES[plan.precision], plan.tp if plan.sequence else 1
    tokens = plan.micro_batch * plan.seq_len // plan.cp
    stages = kept_by_stages(share, plan, stack)
    between = sum(stage.between for stage in stages)
    held = held_bytes(between, tokens, plan.precision, share.in_flight(plan), plan.virtual_stages)
    held = max(held, tokens * size * share.kept_at_once(plan, [stage.between for stage in stages]))
    away = 0
    if plan.activation_offload:
        away = int(held * pinned_share(share, plan, size * tokens))
        lengths = [len(layers) for layers in stages_of(share, plan.split)]
        pairs = zip(stages, lengths, strict=True)
        held = tokens * max(stage.between * min(BLOCKS_HERE, length) // length for stage, length in pairs) * size
    most = max(stages, key=lambda stage: stage.repeated)
    repeated = tokens * most.repeated * size * max(1, share.weights_waiting(plan))
    working = tokens * size * _widest(share, stack)
    if not share.has_last_stage:
        return Activations(held, 0, repeated, working, most.at, away)
    losses = plan.num_microbatches if plan.pp > 1 and SCHEDULES[plan.schedule].holds_all else 1
    spec = as_saved(share.spec, plan.device)
    norm = last_norm_bytes(spec, tokens, size, token_parts, stack)
    if (whole := stack.loss_bytes(tokens, spec.vocab, plan.tp > 1)) is not None:
        head = losses * (norm + whole)
    elif plan.loss == "fused" and spec.is_ours and has_chunks(tokens * spec.vocab):
        waiting, passing = _fused_loss(spec, plan, tokens, size, trains_head)
        head = losses * (norm + waiting) + passing
    else:
        head = losses * head_activation_bytes(spec, tokens, size, token_parts, stack)
        head += _loss_temporaries(spec, plan, tokens, size, trains_head)
    return Activations(held, head, repeated, working, most.at, away)


def _fused_loss(spec: ModelSpec, plan: Plan, tokens: int, size: int, trains_head: bool) -> tuple[int, int]:
    """Returns the bytes that wait from the head's forward to its backward, and those that pass: the gradients of the
    head's input and, in fp32, of its weights wait. First a chunk's logits pass, and where nothing compiles them a block
    of it in fp32; then both gradients as backward hands them on."""
    inputs, elements = size * tokens * spec.hidden, spec.vocab * spec.hidden if trains_head else 0
    waiting = inputs + max(4, size) * elements
    logits = tokens * spec.vocab
    chunk = size * logits // fused_chunks(logits, size, plan.device)
    if plan.formats.is_fp8 and plan.fp8_head:
        # Weights both ways, unless they are frozen and stay so; the chunk's gradient in eight bits, and what it adds to
        # that of the weights.
        weights = spec.vocab * spec.hidden if trains_head or spec.tied else 0
        chunk += 2 * weights + chunk // size + size * elements
    if plan.device == "cpu":  # the gradients that backward hands on are counted as such
        return waiting, chunk
    block = 0 if plan.compile != "none" else logit_bytes(spec, tokens, size)
    return waiting, max(chunk + LOSS_TEMPORARIES["cuda"] * block, inputs + size * elements)


def _loss_temporaries(spec: ModelSpec, plan: Plan, tokens: int, size: int, trains_head: bool) -> int:
    """Returns the bytes beside the logits that are kept: gradients on both sides of the softmax. Where they are
    computed in chunks, the gradient of the head's weights by one chunk and by those before it; of a tied table it waits
    for the embedding's."""
    if plan.device == "cpu":
        return 0
    chunk, whole = logit_bytes(spec, tokens, size), max(4, size) * tokens * spec.vocab
    weights = size * spec.vocab * spec.hidden if trains_head else 0
    gradients = 2 if chunk < whole else int(spec.tied and (plan.uses_fsdp or plan.copies))
    return LOSS_TEMPORARIES["cuda"] * chunk + gradients * weights


@lru_cache(4096)
def _widest(share: RankShare, stack: Stack) -> int:
    """Returns the elements per token of the gradients of gate and up, and of the block's output, which are there at
    once. A compiled block has let go of what it multiplied last by then."""
    spec, last = share.spec, share.layers[-1]
    width = last.feedforward.active_width(spec, last.ffn)
    gone = stack.measured and not stack.fp8_least and not last.is_moe
    return ((2 if spec.gated else 1) - gone) * width + spec.hidden


@lru_cache(256)
def as_saved(spec: ModelSpec, device: str) -> ModelSpec:
    """Returns the model with norms that keep what the device's do: CUDA's RMSNorm is one kernel that keeps its input
    alone, as LayerNorm does everywhere."""
    return replace(spec, norm="layer") if device == "cuda" else spec


def pinned_share(share: RankShare, plan: Plan, column: int) -> float:
    """Returns the bytes of pinned CPU memory for each byte of activations that is offloaded. torch rounds every pinned
    tensor up to a power of two (ATen/core/CachingHostAllocator.h). With full recomputation only hidden states travel;
    else about two tensors of that width for each that is as wide as the feed-forward layer. `column`: bytes of a tensor
    that is one element wide."""
    hidden, ffn = share.spec.hidden * column, share.layers[0].ffn * column
    tensors = [hidden] if plan.recompute == "full" else [hidden, hidden, ffn]
    return sum(1 << (size - 1).bit_length() for size in tensors) / sum(tensors)


def held_bytes(between: int, tokens: int, precision: str, in_flight: int, virtual_stages: int) -> int:
    """Returns the bytes of activations of a rank whose stages keep `between` elements per token, and of which so many
    are in flight."""
    return tokens * between * COMPUTE_BYTES[precision] * in_flight // virtual_stages


def kept_by_stages(share: RankShare, plan: Plan, stack: Stack) -> tuple[Kept, ...]:
    """Returns the elements per token that each of a rank's stages keeps of one micro-batch."""
    kind = plan.cp_kind if plan.cp > 1 else ""
    tokens = TokenShare(
        seq_len=0 if kind == "ring" else plan.seq_len,
        token_parts=plan.tp if plan.sequence else 1,
        routed_parts=plan.tp if plan.ep > 1 else 1,
        exchanged=kind == "ulysses",
        load=stack.expert_load if plan.ep > 1 else 1.0,
        size=COMPUTE_BYTES[plan.precision],
        tokens=plan.micro_batch * plan.seq_len // plan.cp if stack.side_by_side else 0,
    )
    return _kept(share, plan.split, plan.recompute, tokens, plan.device, stack)


@lru_cache(8192)
def _kept(
    share: RankShare, split: tuple[int, ...], mode: str, tokens: TokenShare, device: str, stack: Stack
) -> tuple[Kept, ...]:
    spec = as_saved(share.spec, "cuda" if stack.compiled else device)  # a compiled norm too keeps its input alone
    known: dict[object, tuple[Kept, int]] = {}  # stages whose layers are alike and computed again alike keep as much
    found = []
    for layers in stages_of(share, split):
        first = layers[0].index
        again = [(part.start - first, part.stop - first) for part in segments(mode, numbers_of(layers))]
        key = (*(layer.kind for layer in layers), *again)
        if key not in known:
            known[key] = kept_activations(spec, layers, mode, tokens, stack), first
        kept, before = known[key]
        found.append(replace(kept, at=kept.at - before + first) if before != first else kept)
    return tuple(found)
