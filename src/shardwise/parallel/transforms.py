"""What becomes of the plain decoder, in the order it happens: `TRANSFORMS` runs before the model has memory,
`WEIGHT_TRANSFORMS` once it has its weights, and `docs/transforms.md` shows both as one table.

Each transform is a plain function that changes a part of the model in place and leaves it computing the same values.
Three forms, each visible where it is used: a module *becomes* a subclass of its class (model/replacement.py), something
is wrapped *around* a module (its forward, or torch's hooks), or tensors are *cut*. No transform changes a class of
`model/`, and the names of parameters stay. Between the two lists come memory, weights and the data-parallel wrapper:
`apply.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from shardwise.adapters.dropout import AdapterDropout, apply_dropout
from shardwise.adapters.fused import apply_fused_adapters, apply_lora_add
from shardwise.adapters.lora import Adapters, adapt
from shardwise.kernels.choose_attention import AttentionShape, apply_fastest_attention
from shardwise.kernels.compiled import apply_compile
from shardwise.kernels.float8 import Float8Layers, apply_float8, apply_float8_head
from shardwise.kernels.fused_experts import fuse_experts
from shardwise.kernels.fused_head import FusedHead, apply_fused_head
from shardwise.kernels.fused_projections import apply_fused_projections
from shardwise.kernels.liger import apply_liger
from shardwise.kernels.norm_gradient import apply_norm_gradients
from shardwise.memory.activation_offload import apply_activation_offload
from shardwise.memory.recompute import apply_recompute
from shardwise.model.decoder import Block, Decoder
from shardwise.model.dtypes import COMPUTED
from shardwise.model.experts import moe_layers
from shardwise.model.replacement import become
from shardwise.parallel.context.sequence_split import ContextParallel, apply_context_parallel
from shardwise.parallel.expert.dispatch import apply_expert_parallel
from shardwise.parallel.mesh import Mesh
from shardwise.parallel.tensor.slices import TensorParallel, apply_tensor_parallel
from shardwise.parallel.traffic import Traffic
from shardwise.spec.plan import Plan


@dataclass
class ModelPart:
    """A part of the model on its way from plain to what this rank computes. Up to the end of `TRANSFORMS` it is on
    `meta`, without weights."""

    model: Decoder
    layers: range
    mesh: Mesh
    attention: str  # as the config says
    traffic: Traffic
    adapters: Adapters | None
    tp: TensorParallel | None
    float8: Float8Layers | None = None  # what became of the linear layers, over all parts of this rank
    dropout: AdapterDropout | None = None

    @property
    def plan(self) -> Plan:
        """Returns the plan of the mesh."""
        return self.mesh.plan

    @property
    def device(self) -> torch.device:
        """Returns the device on which the part will run."""
        return self.mesh.device

    @property
    def blocks(self) -> list[Block]:
        """Returns the part's blocks, in order."""
        return [block for block in self.model.layers.values() if isinstance(block, Block)]

    @property
    def dtype(self) -> torch.dtype:
        """Returns the dtype that the part computes in."""
        return COMPUTED[self.plan.precision]


class Transform(NamedTuple):
    """One transform: what of the plain model it replaces, by what, and when, as docs/transforms.md says it. `apply`
    decides by the plan whether it applies."""

    name: str
    replaces: str
    by: str
    when: str
    apply: Callable[[ModelPart], None]


def transform(part: ModelPart) -> None:
    """Applies the transforms that the plan asks for, in order and in place, to a part on `meta`."""
    for one in TRANSFORMS:
        one.apply(part)


def transform_weights(part: ModelPart) -> None:
    """Applies the transforms that need a part's weights, in order and in place."""
    for one in WEIGHT_TRANSFORMS:
        one.apply(part)


def transform_rows() -> list[tuple[str, str, str, str]]:
    """Returns both lists, one after the other, as the docs show them: name, what is replaced, by what, when."""
    return [one[:4] for one in (*TRANSFORMS, *WEIGHT_TRANSFORMS)]


def _adapters(part: ModelPart) -> None:
    part.dropout = adapt(part.model, part.adapters)


def _liger(part: ModelPart) -> None:
    if part.plan.kernels == "liger":
        apply_liger(part.model)


def _context(part: ModelPart) -> None:
    if part.plan.cp > 1:
        cp = ContextParallel(part.mesh.cp, part.plan.cp_kind, part.traffic.on("cp"))
        apply_context_parallel(part.model, cp)


def _expert(part: ModelPart) -> None:
    if part.plan.ep > 1:
        apply_expert_parallel(part.model, part.mesh, part.tp, part.traffic)


def _tensor(part: ModelPart) -> None:
    if part.tp is not None:
        apply_tensor_parallel(part.model, part.tp)


def _loss(part: ModelPart) -> None:
    apply_fused_head(part.model, fused=part.plan.loss == "fused", compiled=part.plan.compile != "none")
    if part.model.head is not None and part.plan.products == "measured":
        from shardwise.kernels.choose_matmul import MeasuredHeadMatmuls  # takes a second to load

        become(part.model.head, FusedHead, matmuls=MeasuredHeadMatmuls())


def _float8(part: ModelPart) -> None:
    plan, emulate = part.plan, part.device.type == "cpu"
    if not plan.formats.is_fp8:
        return
    part.float8 = apply_float8(
        part.model, part.blocks, plan.fp8_recipe, emulate=emulate, fused=plan.fuse, found=part.float8
    )
    if plan.fp8_head:
        apply_float8_head(part.model, part.float8, compiled=plan.compile != "none" and not emulate)


def _projections(part: ModelPart) -> None:
    if part.plan.fuse:
        apply_fused_projections(part.blocks)


def _attention(part: ModelPart) -> None:
    if part.attention == "auto" and part.device.type == "cuda" and part.plan.cp == 1:
        shape = AttentionShape(part.plan.micro_batch, part.plan.seq_len, part.plan.tp)
        layers = part.model.spec.layers[part.layers.start : part.layers.stop]
        apply_fastest_attention(part.model, layers, shape, part.dtype, part.device)


def _fused_adapters(part: ModelPart) -> None:
    if part.plan.compile != "none" and part.plan.tp == 1:
        apply_fused_adapters(part.blocks)


def _lora_add(part: ModelPart) -> None:
    if part.plan.compile != "none" and part.plan.tp == 1 and part.device.type == "cuda":
        apply_lora_add(part.blocks, part.dtype)


def _norms(part: ModelPart) -> None:
    if part.plan.compile != "none" and part.plan.kernels == "own":
        apply_norm_gradients([*part.blocks, part.model])


def _compile(part: ModelPart) -> None:
    plan = part.plan
    if plan.compile != "none":
        apply_compile(
            part.blocks,
            plan.compile,
            selective=plan.recomputes.is_selective,
            whole=plan.tp == plan.cp == plan.ep == 1,
            measured=plan.products == "measured",
            gathers_sums=plan.kernels == "own",
        )


def _dropout(part: ModelPart) -> None:
    apply_dropout(part.blocks, part.dropout)


def _recompute(part: ModelPart) -> None:
    is_in_graphs = part.plan.compile != "none" and part.plan.recomputes.is_selective
    apply_recompute(part.blocks, "none" if is_in_graphs else part.plan.recompute, part.layers.start)


def _offload(part: ModelPart) -> None:
    if part.plan.activation_offload:
        apply_activation_offload(part.blocks, part.device)


def _expert_projections(part: ModelPart) -> None:
    # Only low-precision weights of this rank stay where they are between passes, so that one matmul can read both.
    if part.plan.fuse and part.plan.copies and part.mesh.fsdp is None:
        for layer in moe_layers(part.model):
            fuse_experts(layer.experts)


TRANSFORMS: tuple[Transform, ...] = (
    Transform(
        "adapters",
        "linear layers",
        "`AdaptedLinear` (adapters/lora.py)",
        "`adapter.kind` is lora or qlora",
        _adapters,
    ),
    Transform(
        "liger",
        "RMSNorm and gated feed-forward layers",
        "`LigerNorm`, `LigerFeedForward` (kernels/liger.py)",
        "`speed.kernels` is liger",
        _liger,
    ),
    Transform(
        "context",
        "the decoder's masks and counts, attention over all tokens",
        "`ContextDecoder` with ring or Ulysses attention, `SplitMixture` (parallel/context/)",
        "`parallel.cp` > 1",
        _context,
    ),
    Transform(
        "expert",
        "all experts",
        "`SpreadExperts`, this rank's, with exchanges of rows, and `SplitMixture` (parallel/expert/dispatch.py)",
        "`parallel.ep` > 1",
        _expert,
    ),
    Transform(
        "tensor",
        "weights; embedding, head, output projections",
        "slices; `VocabEmbedding`, `VocabHead`, `RowLinear`, hooks around regions (parallel/tensor/)",
        "`parallel.tp` > 1",
        _tensor,
    ),
    Transform(
        "loss",
        "the head",
        "`FusedHead` (kernels/fused_head.py), its matmuls measured where `speed.products` is measured",
        "always; fused where `speed.loss` is fused",
        _loss,
    ),
    Transform(
        "fp8",
        "matmuls of large linear layers, and of the head",
        "`Float8Linear`, fp8 matmuls in `AdaptedLinear`, `RowLinear` and `FusedHead` (kernels/float8.py)",
        "`memory.precision` is fp8",
        _float8,
    ),
    Transform(
        "projections",
        "q, k, v and gate, up as matmuls of their own",
        "`FusedAttention`, `FusedFeedForward` (kernels/fused_projections.py)",
        "`speed.fuse`, where the projections are plain or all in fp8",
        _projections,
    ),
    Transform(
        "attention",
        "torch's choice of an attention kernel",
        "the fastest one, by measurement (kernels/choose_attention.py)",
        "`model.attention` is auto, on CUDA, with `parallel.cp` = 1",
        _attention,
    ),
    Transform(
        "adapters side by side",
        "x A^T of q, k, v and of gate, up as matmuls of their own",
        "`FusedAdaptersAttention`, `FusedAdaptersFeedForward` (adapters/fused.py)",
        "compiled blocks without tp, adapters without dropout",
        _fused_adapters,
    ),
    Transform(
        "LoRA add",
        "y + (x A^T) B^T as two operations",
        "one kernel (kernels/lora_add.py)",
        "compiled blocks on CUDA without tp, in 16 bits",
        _lora_add,
    ),
    Transform(
        "norms",
        "the backward pass of RMSNorm",
        "`KernelNorm` (kernels/norm_gradient.py)",
        "compiled blocks with `speed.kernels` own",
        _norms,
    ),
    Transform(
        "compile",
        "a block's operations one by one",
        "a compiled graph around its forward, selective recomputation inside (kernels/compiled.py)",
        "`speed.compile` is not none",
        _compile,
    ),
    Transform(
        "dropout",
        "nothing: around a block",
        "the rows and positions that its adapters draw from (adapters/dropout.py)",
        "`adapter.dropout` > 0",
        _dropout,
    ),
    Transform(
        "recompute",
        "what a block saves for backward",
        "its inputs, from which backward computes it again (memory/recompute.py, memory/selective.py)",
        "`memory.recompute` is not none",
        _recompute,
    ),
    Transform(
        "activation offload",
        "what a block saves for backward on the device",
        "pinned CPU memory (memory/activation_offload.py)",
        "`memory.activation_offload`",
        _offload,
    ),
)
"""The transforms of a part on `meta`, in order."""

WEIGHT_TRANSFORMS: tuple[Transform, ...] = (
    Transform(
        "expert projections",
        "gate, up of experts as matmuls of their own",
        "`FusedExperts` (kernels/fused_experts.py)",
        "once weights are there: `speed.fuse`, on one rank with `speed.copies`",
        _expert_projections,
    ),
)
"""The transforms of a part that has its weights and its data-parallel wrapper, in order."""
