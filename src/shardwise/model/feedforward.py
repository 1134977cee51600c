"""The dense feed-forward layer: act(x W_gate) * (x W_up) W_down, or without the gate as in GPT-2.

Owns the activations by name, which the experts use too. Read next: `experts.py`, the sparse version.

Shapes: B batch, T tokens, D model width, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.spec.model import ModelSpec

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
}


class FeedForward(nn.Module):
    """F hidden channels between two projections, with or without a gate."""

    def __init__(self, spec: ModelSpec, ffn: int):
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = nn.Linear(spec.hidden, ffn, bias=spec.mlp_bias) if spec.gated else None
        self.up = nn.Linear(spec.hidden, ffn, bias=spec.mlp_bias)
        self.down = nn.Linear(ffn, spec.hidden, bias=spec.mlp_bias)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down(self.hidden(x_BTD))

    def hidden(self, x_BTD: Tensor) -> Tensor:
        """Returns the hidden channels, of shape (B, T, F)."""
        if self.gate is None:
            return self.activation(self.up(x_BTD))
        return self.activation(self.gate(x_BTD)) * self.up(x_BTD)
