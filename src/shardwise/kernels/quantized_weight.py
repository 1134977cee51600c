"""A frozen weight in eight bits, as a linear layer or a head holds it: rounded once, in the two layouts that its two products read.

    y  = x W^T    reads rows_OI, W with the inputs side by side
    dx = g W      reads columns_IO, W turned around, with the outputs side by side

Two bytes per number, as many as the 16-bit weight they take the place of. Invariant: they are buffers that no checkpoint holds, beside a `weight` that is
None; numbers are the bits times the scale. How they are made and multiplied: kernels/float8.py, kernels/float8_matmul.py.

Shapes: O outputs, I inputs; a scale for each row, or one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn


class Rounded(NamedTuple):
    rows_OI: Tensor
    rows_scale: Tensor
    columns_IO: Tensor
    columns_scale: Tensor


LEAVES = tuple(f"weight_{field}" for field in Rounded._fields)


def hold(layer: nn.Module, rounded: Rounded) -> None:
    """In place of the layer's weight."""
    layer.register_parameter("weight", None)
    for leaf, value in zip(LEAVES, rounded, strict=True):
        layer.register_buffer(leaf, value, persistent=False)


def factor(layer: Any) -> Any:
    """What the layer's product takes beside x: a weight, or what it was rounded to."""
    if layer.weight is not None:
        return layer.weight
    assert hasattr(layer, LEAVES[0]), "a tied head is given the embedding's weight"
    return Rounded(*(getattr(layer, leaf) for leaf in LEAVES))
