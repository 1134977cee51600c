"""Blocks as compiled kernels: torch.compile once for each kind of block, not for the whole model.

Owns the wrapping of a block's forward. All blocks of a kind share one graph, so compiling takes as long for 80 layers as for two, and what hooks do around a block (FSDP2
gathering, messages of other axes, recomputation of whole blocks) stays outside of it. Invariants: a graph has no breaks but for messages to other ranks, and it is made for the shapes of training;
generation, which grows by one token, runs as it is written. Selective recomputation is part of the graph: products with weights and fused attention are kept, all else is made again.

Compiled kernels round where a fused chain ends, not after every operation: bf16 results differ from those of plain operations in the last bit, and are closer to fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.adapters.lora import AdaptedLinear, Chance
from shardwise.kernels.float8 import Float8Linear
from shardwise.kernels.lora_add import add_narrow
from shardwise.kernels.norm_gradient import kernel_norm, operation
from shardwise.model.attention import Attention, AttentionInputs
from shardwise.model.feedforward import FeedForward
from shardwise.model.norm import RMSNorm
from shardwise.spec.lora import adds_in_one_kernel

Parts = tuple[nn.Linear | None, ...]
MODES: dict[str, dict[str, Any]] = {
    "blocks": {"options": {}},
    "graphs": {"options": {"triton.cudagraphs": True}},
    "trace": {"backend": "aot_eager"},
}
KEPT_OPERATIONS = (
    "mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
OUR_KEPT = ("flash", "add_narrow")  # kernels/flash4.py, kernels/lora_add.py
"""What selective recomputation keeps the results of. `bmm` is not here: attention by its definition has a score for every pair of tokens."""


def apply_joined(blocks: Iterable[nn.Module]) -> None:
    """q, k, v and gate, up as one product each, where they are plain or all in fp8: adapters, slices and what is rounded once have products of their own."""
    for module, parts in _with_same_inputs(blocks):
        module.joined = _are_alike(*parts)


def apply_joined_adapters(blocks: Iterable[nn.Module]) -> None:
    """x A^T of q, k, v and of gate, up as one product each, where two or more have adapters. What is dropped is drawn for each layer, so dropout keeps them apart."""
    for module, parts in _with_same_inputs(blocks):
        adapted = [part for part in parts if getattr(part, "lora_a", None) is not None]
        is_plain = all(type(part) is AdaptedLinear and not part.chance.rate for part in adapted)
        module.joined_adapters = len(adapted) > 1 and is_plain


def apply_narrow_sums(blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """What adapters add is added in one kernel, in 16 bits."""
    for block in blocks if dtype.itemsize == 2 else ():
        for module in block.modules():
            a_RI = getattr(module, "lora_a", None)
            if isinstance(module, AdaptedLinear) and a_RI is not None and adds_in_one_kernel(a_RI.shape[0]):
                module.add_narrow = add_narrow()


def apply_norm_gradients(modules: Iterable[nn.Module]) -> None:
    """Of blocks, and of the model itself for its last one: the backward of a norm is one kernel, which adds what is around it if a graph is told to (`gathers_sums`)."""
    operation()
    for module in modules:
        for norm in module.children():
            if isinstance(norm, RMSNorm):
                norm.compute = kernel_norm


def _with_same_inputs(blocks: Iterable[nn.Module]) -> Iterator[tuple[Attention | FeedForward, Parts]]:
    for block in blocks:
        for module in block.modules():
            if isinstance(module, Attention):
                yield module, (module.q, module.k, module.v)
            elif isinstance(module, FeedForward):
                yield module, (module.gate, module.up)


def _are_alike(*parts: nn.Module | None) -> bool:
    kinds = {type(part) for part in parts}
    is_trained = all(p.requires_grad for part in parts if part is not None for p in part.parameters())
    return kinds == {nn.Linear} or (kinds == {Float8Linear} and is_trained)


def apply_compile(
    blocks: Iterable[nn.Module],
    mode: str,
    *,
    selective: bool,
    whole: bool,
    measured: bool = False,
    gathers_sums: bool = False,
) -> None:
    """In place, before recomputation of whole blocks and FSDP2. `whole`: nothing in a block talks to other ranks, else its graph ends at every message.
    `measured`: large products by the kernel that is fastest (kernels/choose_matmul.py). `gathers_sums`: into the backward of norms (kernels/norm_gradient.py)."""
    how = MODES[mode]
    if measured or gathers_sums:
        from shardwise.kernels.graph_passes import GraphPasses  # takes a second to load

        passes = GraphPasses(measures_products=measured, gathers_sums=gathers_sums)
        how = {**how, "options": {**how["options"], "post_grad_custom_post_pass": passes}}
    # One line per block about in-place operations, of which blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for block in blocks:
        block.forward = _compiled(block.forward, getattr(block, "chance", None), how, selective, whole)


def _compiled(
    forward: Callable[..., Any], chance: Chance | None, how: dict[str, Any], selective: bool, whole: bool
) -> Callable[..., Any]:
    def kept(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts)

    fast = torch.compile(kept if selective else forward, fullgraph=whole, dynamic=False, **how)

    @wraps(forward)
    def run(x: torch.Tensor, inputs: AttentionInputs, *args: Any) -> Any:
        if chance is not None:  # a graph that is computed again may not change anything outside of it
            chance.begin(inputs.rows_B, inputs.positions_BT)
        return (fast if inputs.cache is None else forward)(x, inputs, *args)

    return run


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(_keep)


def _keep(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_kept = getattr(operation, "overloadpacket", operation) in _kept_operations()
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _kept_operations() -> set[Any]:
    named = [(torch.ops.aten, name) for name in KEPT_OPERATIONS] + [(torch.ops.shardwise, name) for name in OUR_KEPT]
    return {getattr(where, name) for where, name in named if hasattr(where, name)}
