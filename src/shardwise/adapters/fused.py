"""Fuses adapters in compiled blocks: x A^T of neighbouring layers is one matmul, and what they add is one kernel.

Shapes: B batch, T tokens, D model width, R the rank, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.adapters.lora import AdaptedLinear
from shardwise.kernels.lora_add import lora_add
from shardwise.model.attention import Attention
from shardwise.model.feedforward import FeedForward
from shardwise.model.replacement import become
from shardwise.spec.lora import adds_in_one_kernel


def apply_fused_adapters(blocks: Iterable[nn.Module]) -> None:
    """Makes x A^T of q, k, v and of gate, up one matmul each, in place, where two or more have adapters. What is
    dropped is drawn for each layer, so dropout keeps them apart."""
    for block in blocks:
        for module in block.modules():
            if type(module) is Attention and _have_adapters(module.q, module.k, module.v):
                become(module, FusedAdaptersAttention)
            elif type(module) is FeedForward and _have_adapters(module.gate, module.up):
                become(module, FusedAdaptersFeedForward)


def apply_lora_add(blocks: Iterable[nn.Module], dtype: torch.dtype) -> None:
    """Makes layers add what adapters add in one kernel, in place, where they compute in 16 bits."""
    for block in blocks if dtype.itemsize == 2 else ():
        for module in block.modules():
            a_RI = getattr(module, "lora_a", None)
            if isinstance(module, AdaptedLinear) and a_RI is not None and adds_in_one_kernel(a_RI.shape[0]):
                module.lora_add = lora_add()


class FusedAdaptersAttention(Attention):
    """Attention whose q, k and v compute x A^T of their adapters as one matmul."""

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BTX, k_BTX, v_BTX = project_together([self.q, self.k, self.v], x_BTD)
        return q_BTX, k_BTX, v_BTX


class FusedAdaptersFeedForward(FeedForward):
    """A feed-forward part whose gate and up compute x A^T of their adapters as one matmul."""

    def hidden(self, x_BTD: Tensor) -> Tensor:
        gate_BTF, up_BTF = project_together([self.gate, self.up], x_BTD)
        return self.activation(gate_BTF) * up_BTF


def project_together(linears: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Returns the results of several layers for the same states, one by one but for their adapters: x A^T of all of
    them is one matmul, and so backward has one for the gradients of all A and one for that of x. Layers without an
    adapter may be among them."""
    adapted = [linear for linear in linears if getattr(linear, "lora_a", None) is not None]
    # Scaled while they are put together, a pass that is there anyway.
    a_RI = torch.cat([linear.lora_a * linear.scale for linear in adapted])
    parts = iter(F.linear(x, a_RI).split([linear.lora_a.shape[0] for linear in adapted], dim=-1))
    return [linear(x, next(parts)) if linear in adapted else linear(x) for linear in linears]


def _have_adapters(*parts: nn.Module | None) -> bool:
    adapted = [part for part in parts if getattr(part, "lora_a", None) is not None]
    return len(adapted) > 1 and all(type(part) is AdaptedLinear and not part.dropout.rate for part in adapted)
