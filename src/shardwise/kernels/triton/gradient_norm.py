"""Implements the kernel of optim/gradient_norm.py in Triton. Imported only where there is CUDA.

Each program has every so-many-th piece of a tensor and adds up its squares in fp32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS, BLOCK, WARPS = 1024, 4096, 8


def shares(tensors: list[Tensor]) -> Tensor:
    """Returns a row for each tensor, whose sum is that of the tensor's squares."""
    found = torch.empty(len(tensors), PROGRAMS, dtype=torch.float32, device=tensors[0].device)
    for tensor, row in zip(tensors, found, strict=True):
        each = triton.cdiv(tensor.numel(), PROGRAMS * BLOCK)
        _squared_norm[(PROGRAMS,)](tensor, row, tensor.numel(), each, PROGRAMS, BLOCK, num_warps=WARPS)
    return found


@triton.jit
def _squared_norm(x_ptr, out_ptr, size, EACH: tl.constexpr, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    first = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    for number in range(EACH):
        at = first + tl.cast(number, tl.int64) * PROGRAMS * BLOCK
        x = tl.load(x_ptr + at, mask=at < size, other=0).to(tl.float32)
        total += x * x
    tl.store(out_ptr + tl.program_id(0), tl.sum(total))
