"""The dropout of adapters: what is dropped depends on (seed, step, row, position, channel, layer) only.

So every layout drops the same elements, and a block that is computed again drops what it dropped before. A block says
before it begins which rows and positions its tokens have (`apply_dropout`); its layers draw from that.

Shapes: B batch, T tokens, I inputs of a layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.model.attention import AttentionInputs

ODD = -7046029254386353131  # 2^64 / golden ratio, as a signed number
INVERSE = -1018231460777725123  # INVERSE * ODD = 1, modulo 2^64


def apply_dropout(blocks: Iterable[nn.Module], dropout: AdapterDropout | None) -> None:
    """Makes blocks announce their rows, in place, around compiled blocks and inside of recomputation: a graph that is
    computed again may not change anything outside of it, and what is computed again announces its rows again."""
    if dropout is None or not dropout.rate:
        return
    for block in blocks:
        block.forward = _with_rows(block.forward, dropout)


def _with_rows(forward: Callable[..., Any], dropout: AdapterDropout) -> Callable[..., Any]:
    @wraps(forward)
    def run(x: Tensor, inputs: AttentionInputs, *args: Any) -> Any:
        dropout.begin(inputs.rows_B, inputs.positions_BT)
        return forward(x, inputs, *args)

    return run


@dataclass(eq=False)
class AdapterDropout:
    """Decides what the adapters of a model drop, in the block that computes now."""

    seed: int
    rate: float
    rows_B: Tensor | None = None  # a number for every row of every step; None: nothing is dropped
    positions_BT: Tensor | None = None

    def begin(self, rows_B: Tensor | None, positions_BT: Tensor | None) -> None:
        self.rows_B, self.positions_BT = rows_B, positions_BT

    def salt(self, layer: str) -> Tensor:
        """Returns what tells the draws of this layer from those of others."""
        digest = hashlib.sha256(f"{self.seed}/{layer}".encode()).digest()
        return torch.tensor(int.from_bytes(digest[:8], "little", signed=True), device="cpu")

    def drop(self, x_BTI: Tensor, salt: Tensor, first_input: int) -> Tensor:
        """Returns x with a share `rate` of its elements zero and the others scaled up."""
        if not self.rate or self.rows_B is None:
            return x_BTI
        assert self.positions_BT is not None
        tokens_BT = _mixed(_mixed(self.rows_B[:, None] ^ salt) + self.positions_BT)
        inputs_I = torch.arange(first_input, first_input + x_BTI.shape[-1], device=x_BTI.device)
        # tokens + inputs * ODD, written so that what is multiplied lies in memory: an arange is 32 bits wide in
        # compiled kernels.
        draw_BTI = _mixed(((tokens_BT * INVERSE)[..., None] + inputs_I) * ODD)
        is_kept_BTI = ((draw_BTI >> 40) & 0xFFFFFF) >= int(self.rate * 2**24)
        return x_BTI * is_kept_BTI.to(x_BTI.dtype) / (1 - self.rate)


def _mixed(x: Tensor) -> Tensor:
    """Returns SplitMix64's finalizer of each element: every bit of the input moves every bit of the output.
    Multiplication wraps around, shifts fill with zeros."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * -4658895280553007687
    x = (x ^ ((x >> 27) & (2**37 - 1))) * -7723592293110705685
    return x ^ ((x >> 31) & (2**33 - 1))
