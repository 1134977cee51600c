"""AdamW with 8-bit states as one pass over memory: what a compiler makes one kernel of, for tensors of any length.

    gradient, weight, codes and scales are read once; weight, codes, scales and the weight's 16-bit copy are written once

Plain tensor operations over flat tensors, the arithmetic of torchao's single_param_adam. Its own compiled step reads gradients in fp32, so that
casting, clipping and copying are passes of their own (36 bytes per number instead of 16 over masters with copies), and makes a kernel for every
shape. Nothing waits for the device: numbers of the step are the host's, clipping's factor is read where it is. Read next: low_bit.py.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

BLOCK = 256
SMALLEST = 1e-12  # what the largest number of a block counts for at least


def scalars_of(group: dict[str, Any], count: int, device: torch.device) -> Tensor:
    """What an update reads, in this order, in step `count`."""
    (beta1, beta2), lr = group["betas"], float(group["lr"])
    corrections = 1 - beta1**count, (1 - beta2**count) ** 0.5
    values = (lr * group["weight_decay"], 1 - beta1, 1 - beta2, lr, *corrections, group["eps"])
    return torch.tensor(values, dtype=torch.float32).to(device, non_blocking=True)


def flat(tensor: Tensor) -> Tensor:
    """Its numbers in a row, in the same memory. Not a view: the compiler would look at the shape of what it is one of."""
    tensor = tensor.contiguous()
    row = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return row.set_(tensor.untyped_storage(), tensor.storage_offset(), (tensor.numel(),), (1,))


def update_narrow(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    factor: Tensor | None,
    scalars: Tensor,
    codes: tuple[Tensor, Tensor],
    scales: tuple[Tensor, Tensor],
    maps: tuple[Tensor, Tensor],
) -> None:
    """In place: weight, copy, codes and scales, all flat. A map has the values of its 256 codes, ascending."""
    moments = [_read(*parts) for parts in zip(codes, scales, maps, strict=True)]
    moments = _step(weight, copy, gradient, factor, scalars, *moments)
    for moment, code, scale, values in zip(moments, codes, scales, maps, strict=True):
        blocks = moment.view(-1, BLOCK)
        largest = blocks.abs().amax(1).clip(SMALLEST)
        code.copy_(nearest((blocks / largest[:, None]).view(-1), values))
        scale.copy_(largest)


def update_wide(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    factor: Tensor | None,
    scalars: Tensor,
    moments: tuple[Tensor, Tensor],
) -> None:
    """The same for a tensor whose states are in fp32."""
    for old, new in zip(moments, _step(weight, copy, gradient, factor, scalars, *moments), strict=True):
        old.copy_(new)


def _read(codes: Tensor, scale: Tensor, values: Tensor) -> Tensor:
    return (values[codes.int()].view(-1, BLOCK) * scale[:, None]).view(-1)


def _step(
    weight: Tensor,
    copy: Tensor | None,
    gradient: Tensor,
    factor: Tensor | None,
    scalars: Tensor,
    first: Tensor,
    second: Tensor,
) -> list[Tensor]:
    """The new moments; weight and copy are written."""
    decay, rest1, rest2, lr, correction1, correction2, eps = scalars.unbind()
    g = gradient.float() if factor is None else gradient.float() * factor.float()
    w = weight.float()
    w = w - decay * w
    first = first + rest1 * (g - first)
    second = second + rest2 * (g * g - second)
    w = w - lr * (first / correction1) / (second.sqrt() / correction2 + eps)
    weight.copy_(w)
    if copy is not None:
        copy.copy_(w)
    return [first, second]


def nearest(x: Tensor, values: Tensor) -> Tensor:
    """The code whose value is nearest: a search without branches, eight looks into a table of one KiB."""
    codes = torch.where(x >= values[128], 128, 0)
    for half in (64, 32, 16, 8, 4, 2, 1):
        codes = codes + torch.where(x >= values[codes + half], half, 0)
    above = (codes + 1).clip(max=255)
    low, high = values[codes], values[above]
    return torch.where(x - low >= (high - low) * 0.5, above, codes).to(torch.uint8)


@cache
def compiled() -> tuple[Any, Any]:
    """Both updates as kernels, for tensors of any length."""
    return torch.compile(update_narrow, dynamic=True), torch.compile(update_wide, dynamic=True)
