"""Writes out what one update of AdamW with 8-bit states computes: plain operations over whole tensors, to read, and to
compare the kernel with (kernels/triton/low_bit_adamw.py).

    gradient, weight, codes and scales are read once; weight, codes, scales and low-precision weight are written once

The arithmetic is that of torchao's single_param_adam. Its own compiled step reads gradients in fp32, so that casting,
clipping and copying are passes of their own: 36 bytes per element instead of 16 over master weights. Nothing waits
for the device: scalars of the step are the host's, the factor that clips is read where it is. Read next: low_bit.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.low_bit_codes import BLOCK, SMALLEST_SCALE, nearest


def scalars_of(group: dict[str, Any], count: int, device: torch.device) -> Tensor:
    """Returns the scalars of step `count` in the order in which an update reads them, in fp32 on `device`."""
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    corrections = 1 - beta1**count, (1 - beta2**count) ** 0.5
    values = (lr * group["weight_decay"], 1 - beta1, 1 - beta2, lr, group["eps"], *corrections)
    together = lr / corrections[0], 1 / corrections[1]  # the kernel multiplies
    return torch.tensor(values + together, dtype=torch.float32).to(device, non_blocking=True)


def plain_update(
    weight: Tensor,
    low_precision: Tensor | None,
    gradient: Tensor,
    factor: Tensor | None,
    scalars: Tensor,
    moments: tuple[Any, Any],
) -> None:
    """Updates in place the weight, its low-precision weight, and the moments, which are torchao's with codes or
    fp32."""
    decay, rest1, rest2, lr, eps, correction1, correction2 = scalars[:7].unbind()
    first, second = (moment.dequantize() if hasattr(moment, "codes") else moment for moment in moments)
    g = gradient.float() if factor is None else gradient.float() * factor.float()
    w = weight.float()
    w = w - decay * w
    first = first + rest1 * (g - first)
    second = second + rest2 * (g * g - second)
    w = w - lr * (first / correction1) / (second.sqrt() / correction2 + eps)
    weight.copy_(w)
    if low_precision is not None:
        low_precision.copy_(w)
    for moment, value in zip(moments, (first, second), strict=True):
        if not hasattr(moment, "codes"):
            moment.copy_(value)
            continue
        blocks = value.view(-1, BLOCK)
        largest = blocks.abs().amax(1).clip(SMALLEST_SCALE)
        moment.codes.copy_(nearest(blocks / largest[:, None], moment.qmap).view_as(moment.codes))
        moment.scale.copy_(largest)
