"""Implements the kernel of norm_gradient.py in Triton. Imported only where there is CUDA.

A program goes over every so-many-th row: it holds a row at a time, and the weight's gradient of its rows, in fp32; the
programs' shares of that are added at the end, in the same order every time. A few programs per processor, so that one
computes while others wait for memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

PER_THREAD = 16  # elements of a row that each thread has
MOST_WARPS = 16
STAGES = 3  # rows in shared memory at once: one is computed with while the next ones arrive
# Programs per processor where no share is kept from row to row: there it is them that wait for each other's memory.
FROZEN = 8


def backward(
    grads: list[Tensor], around: Tensor | None, x: Tensor, scale: Tensor, weight_D: Tensor, learns: bool
) -> tuple[Tensor, Tensor]:
    x, (width,), num_rows = x.contiguous(), weight_D.shape, scale.numel()
    given = [one.contiguous() for one in grads]
    out, wide = torch.empty_like(x), triton.next_power_of_2(width)
    num_tensors = len(grads) + 1 + (around is not None)
    programs, stages = schedule(num_tensors, width, x) if learns else (FROZEN * _properties(x.device)[0], 1)
    programs = min(num_rows, programs)
    shares = torch.empty(programs if learns else 0, width, dtype=torch.float32, device=x.device)
    if num_rows:
        _norm_gradient[(programs,)](
            *(given + [x] * 4)[:4], x if around is None else around.contiguous(), x, scale.contiguous(), weight_D, out,
            shares, num_rows, width, len(given), around is not None, learns, triton.cdiv(num_rows, programs), wide,
            stages, num_warps=warps(wide),
        )  # fmt: skip
    return out, (shares.sum(0) if learns else shares.new_empty(0)).to(weight_D.dtype)


def warps(wide: int) -> int:
    """Returns the warps of a program that holds a row of `wide` elements."""
    return max(1, min(MOST_WARPS, wide // (32 * PER_THREAD)))


def schedule(num_tensors: int, width: int, like: Tensor) -> tuple[int, int]:
    """Returns the number of programs, and of stages of each, where so many tensors are read. On an H200 one program
    with three stages for 4096 elements is fastest, two for 2048."""
    processors, shared = _properties(like.device)
    row_bytes = num_tensors * triton.next_power_of_2(width) * like.element_size()
    stages = max(1, min(STAGES, shared // row_bytes))
    fitting = int(0.75 * shared / (stages * row_bytes))
    return processors * (max(1, fitting) if stages > 1 else FROZEN), stages


def _properties(device: torch.device) -> tuple[int, int]:
    """Returns how many processors a GPU has, and the bytes of shared memory of each."""
    if device.type != "cuda":  # the interpreter
        return 1, 1 << 17
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, getattr(found, "shared_memory_per_block_optin", 48 << 10)


@triton.jit
def _norm_gradient(
    a_ptr, b_ptr, c_ptr, d_ptr, around_ptr, x_ptr, scale_ptr, weight_ptr, out_ptr, shares_ptr, num_rows,
    WIDTH: tl.constexpr, TERMS: tl.constexpr, GOES_AROUND: tl.constexpr, LEARNS: tl.constexpr, EACH: tl.constexpr,
    WIDE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, WIDE)
    is_column = columns < WIDTH
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0).to(tl.float32)
    share = tl.zeros([WIDE], tl.float32)
    for number in tl.range(EACH, num_stages=STAGES):
        row = tl.program_id(0) + number * tl.num_programs(0)
        inside = is_column & (row < num_rows)
        at = row.to(tl.int64) * WIDTH + columns
        grad = tl.load(a_ptr + at, mask=inside, other=0).to(tl.float32)
        if TERMS > 1:
            grad += tl.load(b_ptr + at, mask=inside, other=0).to(tl.float32)
        if TERMS > 2:
            grad += tl.load(c_ptr + at, mask=inside, other=0).to(tl.float32)
        if TERMS > 3:
            grad += tl.load(d_ptr + at, mask=inside, other=0).to(tl.float32)
        scale = tl.load(scale_ptr + row, mask=row < num_rows, other=0)
        normed = tl.load(x_ptr + at, mask=inside, other=0).to(tl.float32) * scale
        weighted = grad * weight
        result = (weighted - normed * (tl.sum(weighted * normed) / WIDTH)) * scale
        if GOES_AROUND:
            result += tl.load(around_ptr + at, mask=inside, other=0).to(tl.float32)
        tl.store(out_ptr + at, result.to(out_ptr.dtype.element_ty), mask=inside)
        if LEARNS:
            share += grad * normed
    if LEARNS:
        tl.store(shares_ptr + tl.program_id(0).to(tl.int64) * WIDTH + columns, share, mask=is_column)
