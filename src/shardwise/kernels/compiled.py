"""Compiles blocks into kernels: torch.compile once for each kind of block, not for the whole model.

Owns the wrapping of a block's forward. All blocks of a kind share one graph, so compiling takes as long for 80 layers
as for two, and what hooks do around a block (FSDP2 gathering, collectives of other axes, recomputation of whole blocks)
stays outside of it. Invariants: a graph has no breaks but for collectives with other ranks, and it is made for the
shapes of training; generation, which grows by one token, runs as it is written. Selective recomputation (activation
checkpointing) is part of the graph: matmuls with weights and fused attention are kept, all else is computed again.

Compiled kernels round where a fused chain ends, not after every operation: bf16 results differ from those of plain
operations in the last bit, and are closer to fp32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from shardwise.model.attention import AttentionInputs

MODES: dict[str, dict[str, Any]] = {
    "blocks": {"options": {}},
    "graphs": {"options": {"triton.cudagraphs": True}},
    "trace": {"backend": "aot_eager"},
}
KEPT_OPERATIONS = (
    "mm", "addmm", "_scaled_mm", "_grouped_mm", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
"""The operations whose results selective recomputation keeps. `bmm` is not here: attention by its definition has a
score for every pair of tokens."""
OUR_KEPT = ("flash", "lora_add")  # operations of our own: kernels/flash4.py, kernels/lora_add.py


def apply_compile(
    blocks: Iterable[nn.Module],
    mode: str,
    *,
    selective: bool,
    whole: bool,
    measured: bool = False,
    gathers_sums: bool = False,
) -> None:
    """Compiles blocks in place, before recomputation of whole blocks and FSDP2. With `whole` nothing in a block
    communicates with other ranks, else its graph ends at every collective. With `measured` large matmuls take the
    kernel that is fastest (choose_matmul.py). With `gathers_sums` sums of gradients become part of the backward of
    norms (norm_gradient.py)."""
    how = MODES[mode]
    if measured or gathers_sums:
        from shardwise.kernels.graph_passes import GraphPasses  # takes a second to load

        passes = GraphPasses(measures_matmuls=measured, gathers_sums=gathers_sums)
        how = {**how, "options": {**how["options"], "post_grad_custom_post_pass": passes}}
    # One line per block about in-place operations, of which blocks have none.
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    for block in blocks:
        block.forward = _compiled(block.forward, how, selective, whole)


def _compiled(forward: Callable[..., Any], how: dict[str, Any], selective: bool, whole: bool) -> Callable[..., Any]:
    def kept(*args: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts)

    fast = torch.compile(kept if selective else forward, fullgraph=whole, dynamic=False, **how)

    @wraps(forward)
    def run(x: torch.Tensor, inputs: AttentionInputs, *args: Any) -> Any:
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
