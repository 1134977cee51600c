"""The dense feed-forward layer: act(x W_gate) * (x W_up) W_down, or without the gate as in GPT-2.

Owns the activations by name, which the experts use too. Read next: `experts.py`, the sparse version.

Shapes: B batch, T tokens, D model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kernels.gated import gated
from shardwise.spec.model import ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


def join(linears: Sequence[nn.Linear], x: Tensor) -> Tensor:
    """Several projections of the same states as one matrix product, side by side. The weights stay apart; putting them together costs a copy of them."""
    weight = torch.cat([linear.weight for linear in linears])
    biases = tuple(linear.bias for linear in linears if linear.bias is not None)
    bias = torch.cat(biases) if biases else None
    product = getattr(linears[0], "product", None)  # of fp8
    if product is None:
        return F.linear(x, weight, bias)
    y = product(x, weight)
    return y if bias is None else y + bias.to(y.dtype)


def join_adapters(linears: Sequence[Any], x: Tensor) -> list[Tensor]:
    """Several projections of the same states, one by one but for their adapters: x A^T of all of them is one product, and so backward has one for
    the gradients of all A and one for that of x. Layers without an adapter may be among them."""
    adapted = [linear for linear in linears if getattr(linear, "lora_a", None) is not None]
    # Scaled while they are put together, a pass that is there anyway.
    a_RI = torch.cat([linear.lora_a * linear.scale for linear in adapted])
    narrow = iter(F.linear(x, a_RI).split([linear.lora_a.shape[0] for linear in adapted], dim=-1))
    return [linear(x, next(narrow)) if linear in adapted else linear(x) for linear in linears]


class FeedForward(nn.Module):
    joined = False  # gate and up are one product
    joined_adapters = False  # only what is narrow of them is

    def __init__(self, spec: ModelSpec, ffn: int):
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = nn.Linear(spec.hidden, ffn, bias=spec.mlp_bias) if spec.gated else None
        self.up = nn.Linear(spec.hidden, ffn, bias=spec.mlp_bias)
        self.down = nn.Linear(ffn, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.activation(self.up(x_BTD)))
        if self.joined:
            return self.down(gated(join([self.gate, self.up], x_BTD), self.activation))
        if self.joined_adapters:
            gate_BTF, up_BTF = join_adapters([self.gate, self.up], x_BTD)
            return self.down(self.activation(gate_BTF) * up_BTF)
        return self.down(self.activation(self.gate(x_BTD)) * self.up(x_BTD))
