"""Computes act(gate) * up of a matmul that has both side by side, as one operation with one backward.

Split in two, the gradient of the matmul is put together from two halves, and a compiler reads everything once for each
half. Here forward reads 2F elements of a row and writes F, backward reads 3F and writes 2F: on CUDA one kernel each
(`triton/gated.py`), elsewhere plain operations. A compiler sees one operation and does not compute it twice. Invariant:
in fp64 and on CPUs results are those of `activation(gate) * up`, to the last bit; the kernels compute in fp32 and round
once, as compiled code does. Read next: `fused_projections.py`.

Shapes: N rows, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from shutil import which
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def gated(y_N2F: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns activation(gate) * up of [gate, up] along the last dimension. Only silu has a kernel."""
    if activation is F.silu:
        return torch.ops.shardwise.gated_silu(y_N2F)
    gate_NF, up_NF = y_N2F.chunk(2, dim=-1)
    return activation(gate_NF) * up_NF


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed: torch's wheels for CUDA bring it along; it needs a C compiler for its
    launches."""
    return find_spec("triton") is not None and any(which(name) for name in ("gcc", "clang"))


def uses_kernel(tensor: Tensor) -> bool:
    """Returns whether a Triton kernel computes this tensor. fp64 has none: there every operation is torch's own."""
    return tensor.is_cuda and tensor.dtype in KERNEL_DTYPES and has_triton()


def _forward(y_N2F: Tensor) -> Tensor:
    if uses_kernel(y_N2F):
        from shardwise.kernels.triton.gated import forward

        return forward(y_N2F)
    gate_NF, up_NF = y_N2F.chunk(2, dim=-1)
    return F.silu(gate_NF) * up_NF


def _backward(grad_NF: Tensor, y_N2F: Tensor) -> Tensor:
    if uses_kernel(y_N2F):
        from shardwise.kernels.triton.gated import backward

        return backward(grad_NF, y_N2F)
    gate_NF, up_NF = y_N2F.chunk(2, dim=-1)
    grad_gate_NF = torch.ops.aten.silu_backward(grad_NF * up_NF, gate_NF)
    return torch.cat([grad_gate_NF, grad_NF * F.silu(gate_NF)], dim=-1)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _differentiate(ctx: Any, grad_NF: Tensor) -> Tensor:
    return torch.ops.shardwise.gated_silu_backward(grad_NF, ctx.saved_tensors[0])


def _halved(y_N2F: Tensor) -> Tensor:
    return y_N2F.new_empty(*y_N2F.shape[:-1], y_N2F.shape[-1] // 2)


_operation = torch.library.custom_op(
    "shardwise::gated_silu", _forward, mutates_args=(), schema="(Tensor y_N2F) -> Tensor"
)
_operation.register_fake(_halved)
_operation.register_autograd(_differentiate, setup_context=_keep)
_gradient = torch.library.custom_op(
    "shardwise::gated_silu_backward", _backward, mutates_args=(), schema="(Tensor grad_NF, Tensor y_N2F) -> Tensor"
)
_gradient.register_fake(lambda grad_NF, y_N2F: torch.empty_like(y_N2F, memory_format=torch.contiguous_format))
