"""Adds what an adapter computes, as one operation in compiled blocks: `shardwise::lora_add`, y + x B^T, with x of a few
columns.

Apart, the matmul's result is written as wide as y, and whoever wants the sum reads both, again and again. On a GPU one
kernel (`triton/lora_add.py`) reads y, multiplies and writes the sum: one pass, and one rounding where two operations
round twice.

Shapes: N tokens, R the rank, O outputs.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def lora_add() -> Any:
    """Returns the operation (y, x, B) -> y + x B^T, which torch knows from the first call on."""
    torch.library.define("shardwise::lora_add", "(Tensor y, Tensor x, Tensor b) -> Tensor", lib=_here())
    torch.library.impl("shardwise::lora_add", "CUDA", _add, lib=_here())
    torch.library.impl("shardwise::lora_add", "CPU", lambda y, x, b: y + F.linear(x, b), lib=_here())
    torch.library.register_fake("shardwise::lora_add", lambda y, x, b: y.new_empty(y.shape), lib=_here())
    torch.library.register_autograd("shardwise::lora_add", _gradients, setup_context=_keep, lib=_here())
    return torch.ops.shardwise.lora_add.default


def _add(y: Tensor, x: Tensor, b_OR: Tensor) -> Tensor:
    from shardwise.kernels.triton.lora_add import add  # Triton takes seconds to load

    return add(y.flatten(0, -2), x.flatten(0, -2), b_OR).view(y.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # torch names its arguments
    ctx.save_for_backward(*inputs[1:])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x, b_OR = ctx.saved_tensors
    return gradient, gradient @ b_OR, gradient.flatten(0, -2).t() @ x.flatten(0, -2)


@cache
def _here() -> torch.library.Library:
    return torch.library.Library("shardwise", "FRAGMENT")
