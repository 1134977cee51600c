"""Fused projections (`speed.fuse`): q, k and v of attention are one matmul (fused qkv), gate and up of a feed-forward
layer another.

One wide matmul keeps a GPU busier than three narrow ones, and backward reads its input once. The weights stay apart,
under their names; putting them side by side costs a copy of them in every pass.

Shapes: B batch, T tokens, D model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kernels.float8 import Float8Linear
from shardwise.kernels.gated import gated
from shardwise.model.attention import Attention
from shardwise.model.feedforward import FeedForward
from shardwise.model.replacement import become


def apply_fused_projections(blocks: Iterable[nn.Module]) -> None:
    """Fuses projections in place where they are plain or all in fp8. Those with adapters, slices by input and quantized
    weights have matmuls of their own, and so has liger-kernel's feed-forward layer."""
    for block in blocks:
        for module in block.modules():
            if type(module) is Attention and _are_alike(module.q, module.k, module.v):
                become(module, FusedAttention)
            elif type(module) is FeedForward and _are_alike(module.gate, module.up):
                become(module, FusedFeedForward)


class FusedAttention(Attention):
    """Attention whose q, k and v are one matmul."""

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        sizes = [part.weight.shape[0] for part in (self.q, self.k, self.v)]
        q_BTX, k_BTX, v_BTX = fused_projection([self.q, self.k, self.v], x_BTD).split(sizes, dim=-1)
        return q_BTX, k_BTX, v_BTX


class FusedFeedForward(FeedForward):
    """A feed-forward layer whose gate and up are one matmul."""

    def hidden(self, x_BTD: Tensor) -> Tensor:
        assert self.gate is not None
        return gated(fused_projection([self.gate, self.up], x_BTD), self.activation)


def fused_projection(linears: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """Returns the results of several linear layers side by side, by one matmul."""
    weight = torch.cat([linear.weight for linear in linears])
    biases = tuple(linear.bias for linear in linears if linear.bias is not None)
    bias = torch.cat(biases) if biases else None
    first = linears[0]
    if not isinstance(first, Float8Linear):
        return F.linear(x, weight, bias)
    y = first.matmul(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


def _are_alike(*parts: nn.Module | None) -> bool:
    kinds = {type(part) for part in parts}
    is_trained = all(p.requires_grad for part in parts if part is not None for p in part.parameters())
    return kinds == {nn.Linear} or (kinds == {Float8Linear} and is_trained)
