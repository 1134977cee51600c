"""Holds a frozen weight in eight bits, for a linear layer or a head: quantized once, in the layouts of its two matmuls.

    y  = x W^T    reads rows_OI, W with the inputs side by side
    dx = g W      reads columns_IO, W transposed, with the outputs side by side

Two bytes per element, as many as the 16-bit weight they take the place of. Invariant: they are buffers that no
checkpoint holds, beside a `weight` that is None; an element is its bits times its scale. How they are made and
multiplied: `float8.py`, `float8_matmul.py`.

Shapes: O outputs, I inputs; a scale for each row, or one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class QuantizedWeight(NamedTuple):
    """A weight in eight bits: by rows and transposed, each with its scales."""

    rows_OI: Tensor
    rows_scale: Tensor
    columns_IO: Tensor
    columns_scale: Tensor


LEAVES = tuple(f"weight_{field}" for field in QuantizedWeight._fields)


def hold_quantized(layer: nn.Module, weight: QuantizedWeight) -> None:
    """Puts a quantized weight in place of the layer's own."""
    layer.register_parameter("weight", None)
    for leaf, value in zip(LEAVES, weight, strict=True):
        layer.register_buffer(leaf, value, persistent=False)


def weight_of(layer: Any) -> Any:
    """Returns what the layer's matmul takes beside x: its weight, or what that was quantized to."""
    if layer.weight is not None:
        return layer.weight
    assert hasattr(layer, LEAVES[0]), "a tied head is given the embedding's weight"
    return QuantizedWeight(*(getattr(layer, leaf) for leaf in LEAVES))
