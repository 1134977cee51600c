"""What a rank holds at the moments when it may hold most, and which of them it is. Bytes, no torch.

    forward     all micro-batches of the schedule are in flight, and on the last stage the loss is computed
    backward    a block is computed again; those after it are gone
    end         the last backward is over: gradients are complete, activations gone

Invariant: the parts of a `StageMemory` add up to its peak. Each part is the most that its name ever holds; what the parts add up to beyond the
peak is a negative part, `never at once`. Read next: states.py, activations.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from shardwise.model.spec import ModelSpec
from shardwise.plan.activations import Kept, head_activation_bytes, kept_activations, logit_bytes, loss_bytes
from shardwise.plan.offloaded import offloaded
from shardwise.plan.plan import Plan
from shardwise.plan.rank_share import Cut, RankShare, stages_of_cut
from shardwise.plan.stack import Stack
from shardwise.plan.states import COMPUTE_BYTES, Groups, states_of

PROCESS_BYTES = {"cpu": 305 * 2**20, "cuda": 0}
"""What a rank holds besides tensors: interpreter, torch and its math libraries. On CUDA only tensors are counted."""

ALLOCATOR_SHARE = {"cpu": 0.45, "cuda": 0.03}
"""Backward's own temporaries, and on a CPU what malloc keeps in holes; as a share of the activations.
CPU: fitted to `tiny` with micro-batches of 1 and 8 on one machine. CUDA: what was left over in six jobs on an H200, docs/benchmarks.md."""

RESERVED_SHARE = 0.05
"""What torch's caching allocator holds beyond what is allocated at the peak: blocks that are free but of the wrong size. The middle of what 245
published runs of two frameworks reserve beyond the bytes of their tensors."""

CONTEXT_BYTES = 3 * 2**29
"""Of a process on a GPU that nobody allocates: CUDA's context and kernels, about half a GiB, and NCCL's channels, 10 MiB each."""

LOSS_TEMPORARIES = {"cpu": 0, "cuda": 2}
"""Copies of a chunk's logits that the loss has besides the one it keeps: gradients on both sides of the softmax. On a CPU the share above
was fitted with them inside."""

BLOCKS_HERE = 3
"""With activation offload: one that computes and two on their way to CPU memory (memory/activation_offload.py)."""

APART = "never at once"
"""The part of a prediction that is negative: others are not full at the same moment."""


@dataclass(frozen=True)
class StageMemory:
    """Of one rank along the pipeline."""

    parts: dict[str, int]
    moment: str  # of the peak

    @property
    def peak(self) -> int:
        return sum(self.parts.values())

    def to_dict(self) -> dict[str, object]:
        return {"peak": self.peak, "moment": self.moment, "parts": self.parts}


@dataclass(frozen=True)
class Activations:
    held: int  # of all stages in flight
    head: int  # of the loss on top, if this rank has it
    repeated: int  # what backward computes again on top
    at: int  # the layer where that is most

    @property
    def most(self) -> int:
        return self.held + max(self.head, self.repeated)


def rank_memory(share: RankShare, groups: Groups, plan: Plan, optimizer: str, stack: Stack) -> StageMemory:
    states = states_of(share, groups, plan, optimizer, stack)
    activations = activations_of(share, plan, stack)
    counts_tensors = stack.published == "allocated"
    temporary = int(ALLOCATOR_SHARE[plan.device] * activations.most) if counts_tensors else 0
    parts = {
        "weights": states.weights,
        "gathered": states.gathered,
        "gradients": states.gradients,
        "optimizer": states.optimizer,
        "activations": activations.most,
        "allocator": temporary,
        "process": PROCESS_BYTES[plan.device] if stack.published != "process" else CONTEXT_BYTES,
    }
    parts |= offloaded(parts, share, plan)[0] if plan.offload != "none" else {}
    always = parts["weights"] + parts["optimizer"] + parts["process"]
    first = parts["gathered"] + parts["activations"] + parts["allocator"]
    complete = parts["gradients"]
    so_far = complete if states.accumulated else 0
    at_end = complete + states.reduced + (parts["gathered"] if plan.zero == 3 and states.reduced else 0)
    # What a backward leaves is added up when it is over: the activations of its micro-batch are gone by then.
    arrives = complete + states.arriving + activations.held * (share.stages_in_flight - 1) // share.stages_in_flight
    moments = {_fullest_forward(share, plan, activations): so_far + first, "end of a backward": arrives}
    moments["end of the last backward"] = at_end
    moment = max(moments, key=lambda name: moments[name])
    # CPU: the allocator's share was fitted to the plain sum, which stays.
    peak = moments[moment] if plan.device == "cuda" else first + complete
    parts[APART] = min(0, peak - first - complete)
    if not counts_tensors:
        parts["allocator"] = int(RESERVED_SHARE * (always + first + complete + parts[APART] - parts["process"]))
    return StageMemory(parts, moment if plan.device == "cuda" else "end of the last backward")


def _fullest_forward(share: RankShare, plan: Plan, activations: Activations) -> str:
    flight = f", {share.stages_in_flight} in flight" if share.stages_in_flight > 1 else ""
    if activations.repeated > activations.head:
        return f"backward of layer {activations.at}{flight}"
    return f"loss{flight}" if share.has_last_stage else f"end of forward{flight}"


def activations_of(share: RankShare, plan: Plan, stack: Stack) -> Activations:
    """Of every stage in flight; a loss is followed by its backward at once, except by gpipe. What is computed again comes on top, when
    the head's logits are gone; a split backward holds it until the weights have their gradients."""
    size, token_parts = COMPUTE_BYTES[plan.precision], plan.tp if plan.sequence else 1
    tokens = plan.micro_batch * plan.seq_len // plan.cp
    kind, routed_parts = plan.cp_kind if plan.cp > 1 else "", plan.tp if plan.ep > 1 else 1
    keys = 0 if kind == "ring" else plan.seq_len
    stages = _kept(
        share.cut, plan.split, plan.recompute, keys, token_parts, routed_parts, kind == "ulysses", plan.device, stack
    )
    between = sum(stage.between for stage in stages)
    held = tokens * between * size * share.stages_in_flight // plan.virtual_stages
    if plan.activation_offload:
        lengths = [len(layers) for layers in stages_of_cut(share.cut, plan.split)]
        here = max(
            stage.between * min(BLOCKS_HERE, length) // length for stage, length in zip(stages, lengths, strict=True)
        )
        held = tokens * here * size
    most = max(stages, key=lambda stage: stage.repeated)
    repeated = tokens * most.repeated * size * max(1, share.weights_waiting)
    if not share.has_last_stage:
        return Activations(held, 0, repeated, most.at)
    losses = plan.num_microbatches if plan.pp > 1 and plan.schedule == "gpipe" else 1
    spec = _as_saved(share.cut, plan.device)
    if stack.logit_bytes:
        head = losses * loss_bytes(spec, tokens, size, token_parts, plan.tp > 1, stack)
    else:
        head = losses * head_activation_bytes(spec, tokens, size, token_parts, stack)
        head += LOSS_TEMPORARIES[plan.device] * logit_bytes(spec, tokens, size)
    if (
        spec.tied and plan.uses_fsdp and not stack.half_weights
    ):  # that gradient's part of the head waits for the embedding's
        head += size * share.embedding
    return Activations(held, head, repeated, most.at)


@lru_cache(4096)
def _as_saved(cut: Cut, device: str) -> ModelSpec:
    """CUDA's RMSNorm is one kernel that keeps its input alone, as LayerNorm does everywhere."""
    return cut.spec.with_overrides({"norm": "layer"}) if device == "cuda" else cut.spec


@lru_cache(8192)
def _kept(
    cut: Cut,
    split: tuple[int, ...],
    mode: str,
    keys: int,
    token_parts: int,
    routed_parts: int,
    exchanged: bool,
    device: str,
    stack: Stack,
) -> tuple[Kept, ...]:
    """Of each of the rank's stages."""
    spec = _as_saved(cut, device)
    return tuple(
        kept_activations(spec, layers, mode, keys, token_parts, routed_parts, exchanged, stack)
        for layers in stages_of_cut(cut, split)
    )
