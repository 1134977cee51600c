"""Implements the kernel of lora_add.py in Triton: out = y + x B^T. Imported only where there is CUDA.

One program has TALL rows and WIDE columns of the result. The matmul is of 16-bit elements with an fp32 sum; y is added
to that, and the sum is rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TALL, WIDE, WARPS = 32, 128, 4  # the fastest of nine choices on an H200: as fast as a copy
LEAST_RANK = 16  # the smallest inner dimension of a tensor core's matmul


def add(y_NO: Tensor, x_NR: Tensor, b_OR: Tensor) -> Tensor:
    """Returns y + x B^T; x may be a part of the rows of another matrix."""
    y_NO, b_OR = y_NO.contiguous(), b_OR.contiguous()
    x_NR = x_NR if x_NR.stride(1) == 1 else x_NR.contiguous()
    out_NO = torch.empty_like(y_NO)
    (num_rows, width), rank = y_NO.shape, x_NR.shape[1]
    padded = max(LEAST_RANK, triton.next_power_of_2(rank))
    if out_NO.numel():
        grid = (triton.cdiv(width, WIDE) * triton.cdiv(num_rows, TALL),)
        _lora_add[grid](
            y_NO, x_NR, b_OR, out_NO, num_rows, width, x_NR.stride(0), rank, padded, TALL, WIDE, num_warps=WARPS
        )
    return out_NO


@triton.jit
def _lora_add(
    y_ptr, x_ptr, b_ptr, out_ptr, num_rows, width, x_stride,
    RANK: tl.constexpr, PADDED: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(width, WIDE)
    rows = (tl.program_id(0) // across).to(tl.int64) * TALL + tl.arange(0, TALL)
    columns, ranks = tl.program_id(0) % across * WIDE + tl.arange(0, WIDE), tl.arange(0, PADDED)
    is_row, is_column, is_rank = rows < num_rows, columns < width, ranks < RANK
    at = rows[:, None] * width + columns[None, :]
    inside = is_row[:, None] & is_column[None, :]
    y = tl.load(y_ptr + at, mask=inside, other=0)
    x = tl.load(x_ptr + rows[:, None] * x_stride + ranks[None, :], mask=is_row[:, None] & is_rank[None, :], other=0)
    b = tl.load(b_ptr + columns[:, None] * RANK + ranks[None, :], mask=is_column[:, None] & is_rank[None, :], other=0)
    total = tl.dot(x, tl.trans(b), out_dtype=tl.float32) + y.to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)
