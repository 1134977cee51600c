"""Defines the 8-bit codes of optimizer states: how a block of elements is scaled and which code each element gets.

A map holds the values of its 256 codes in ascending order (torchao's). The kernel (triton/low_bit_adamw.py) and the
plain update that it is compared with (optim/low_bit_update.py) both ask here.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256  # elements that share a scale
SMALLEST_SCALE = 1e-12  # the least that the largest element of a block counts for


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """Returns the code whose value is nearest to each element, the upper one in the middle between two."""
    below = (torch.bucketize(x, values, right=True, out_int32=True) - 1).clip(min=0)
    above = (below + 1).clip(max=255)
    low, high = values[below], values[above]
    return torch.where(x - low >= (high - low) * 0.5, above, below).to(torch.uint8)


def bounds_of(values: Tensor) -> Tensor:
    """Returns for each code the least number for which `nearest` finds it: comparing with it decides as `nearest` does,
    to the last bit."""
    low, half = values[:-1], (values[1:] - values[:-1]) * 0.5
    bounds = low + half
    # The three roundings, here and in `nearest`, move a bound by at most three steps, up or down.
    for _ in range(3):
        bounds = torch.where(bounds - low >= half, bounds, bounds.nextafter(values[1:]))
    for _ in range(3):
        below = bounds.nextafter(low)
        bounds = torch.where(below - low >= half, below, bounds)
    return torch.cat([bounds.new_full((1,), -torch.inf), bounds])
