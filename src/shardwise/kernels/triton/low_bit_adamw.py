"""Implements the kernel of low_bit_update.py in Triton: one pass over memory. Imported only where there is CUDA.

A block of 256 elements is one warp's. A code's value is looked up in its map. The code of x = moment / scale,
|x| <= 1, is found by arithmetic and one look into a table of bounds. The values of a map lie evenly within a decade:
2^i of them from 10^(i-7) to 10^(i-6), i = 0 ... 6, on either side of zero, or twice as many without a sign. So how many
are below |x| is a line in each decade, but for one. The lines meet where decades do, each less steep than the one
before: the lowest of them is the one that counts.

Invariant: moments are rounded where plain operations round, and so codes and scales are theirs. Nothing is contracted
but what says so (`enable_fp_fusion`), and x is the exact quotient, rounded. A weight's change is right to ten
roundings.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from shardwise.kernels.low_bit_codes import BLOCK, bounds_of

ROWS = 4  # blocks of one program: each of 128 threads has 8 elements, two reads of 16 bytes per fp32 tensor


def update(
    weight: Tensor,
    low_precision: Tensor | None,
    gradient: Tensor,
    factor: Tensor | None,
    scalars: Tensor,
    moments: tuple[Any, Any],
) -> None:
    """Updates weight, low-precision weight and moments in place; moments are torchao's with codes, or fp32."""
    gradient, size = gradient.contiguous(), weight.numel()
    if not size:
        return
    is_quantized = hasattr(moments[0], "codes")
    states = [part for moment in moments for part in (_parts(moment) if is_quantized else (moment, *[scalars] * 3))]
    assert all(tensor.is_contiguous() for tensor in (weight, *states))
    piece = stride = size
    is_apart = False
    # It may lie between pieces of another (kernels/fused_experts.py).
    if low_precision is not None and not low_precision.is_contiguous():
        piece, stride = low_precision[0].numel(), low_precision.stride(0)
        is_apart = piece % BLOCK + stride % BLOCK != 0 or not low_precision[0].is_contiguous()
    has_copy, has_factor = low_precision is not None and not is_apart, factor is not None
    _adamw8bit[(triton.cdiv(size, ROWS * BLOCK),)](
        weight, low_precision if has_copy else weight, gradient, factor if has_factor else scalars, scalars, *states,
        size, piece, stride, has_factor, has_copy, piece != size, is_quantized, ROWS, BLOCK, enable_fp_fusion=False,
    )  # fmt: skip
    if low_precision is not None and is_apart:
        low_precision.copy_(weight)


def _parts(moment: Any) -> tuple[Tensor, ...]:
    return moment.codes, moment.scale, moment.qmap, _bounds(moment.signed, moment.codes.device)


@cache
def _bounds(signed: bool, device: torch.device) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    return bounds_of(OptimState8bit.zeros((BLOCK,), signed, BLOCK).qmap).to(device, non_blocking=True)


@triton.jit
def _quotient(x, by, inverse):
    """Returns x / by, rounded once, where `inverse` is 1 / by, rounded: the product is corrected by what it leaves
    over."""
    near = x * inverse
    return tl.fma(tl.fma(-near, by, x), inverse, near)


@triton.jit
def nearest(x, bounds, IS_SIGNED: tl.constexpr):
    """Returns the code of x, or the one above; which of them, `bounds` knows. Adding 0.3 makes it never less: the last
    value is 1, a quarter of a distance nearer than the others. It is never two more either: between decades bounds are
    a fifth of a distance late."""
    SIDES: tl.constexpr = 1 if IS_SIGNED else 2
    MORE: tl.constexpr = 0.3 if IS_SIGNED else 0.3 - 1
    size = tl.abs(x)
    above = tl.fma(size, SIDES * 64 / 0.9, SIDES * 64 * 8 / 9 + MORE)
    for i in tl.static_range(6):
        above = tl.minimum(above, tl.fma(size, SIDES * 2**i * 10 ** (6 - i) / 0.9, SIDES * 2**i * 8 / 9 + MORE))
    # A NaN finds the last code; its block's scale is NaN.
    code = tl.minimum(above, SIDES * 128 + MORE).to(tl.int32)
    if IS_SIGNED:
        code = tl.where(x < 0, 128 - code, 127 + code)
    return code - (x < tl.load(bounds + code.to(tl.uint32))).to(tl.int32)


@triton.jit
def _spread(x, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Returns a value per block for each of the block's elements, in a row: a table is looked into along one
    dimension."""
    return tl.reshape(tl.broadcast_to(x[:, None], (ROWS, BLOCK)), (ROWS * BLOCK,))


@triton.jit
def _pack(
    moment, codes_ptr, scale_ptr, bounds, at, row, inside, row_inside,
    IS_SIGNED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    bits = moment.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # of |moment|: in the same order, with NaN above all
    largest = tl.max(tl.reshape(bits, (ROWS, BLOCK)), axis=1).to(tl.float32, bitcast=True)
    scale = tl.where(largest < 1e-12, 1e-12, largest)  # SMALLEST_SCALE
    x = _quotient(moment, _spread(scale, ROWS, BLOCK), _spread(tl.div_rn(1.0, scale), ROWS, BLOCK))
    tl.store(codes_ptr + at, nearest(x, bounds, IS_SIGNED).to(tl.uint8), mask=inside)
    tl.store(scale_ptr + row, scale, mask=row_inside)


@triton.jit
def _adamw8bit(
    w_ptr, copy_ptr, g_ptr, factor, scalars,
    m_ptr, m_scale, m_map, m_bounds, v_ptr, v_scale, v_map, v_bounds, size, piece, stride,
    HAS_FACTOR: tl.constexpr, HAS_COPY: tl.constexpr, IS_CUT: tl.constexpr, IS_NARROW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * ROWS
    row, at = start + tl.arange(0, ROWS), start * BLOCK + tl.arange(0, ROWS * BLOCK)
    inside, row_inside = at < size, row * BLOCK < size
    g = tl.load(g_ptr + at, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    m = tl.load(m_ptr + at, mask=inside, other=0)
    v = tl.load(v_ptr + at, mask=inside, other=0)
    if IS_NARROW:
        m_scales, v_scales = tl.load(m_scale + row, mask=row_inside), tl.load(v_scale + row, mask=row_inside)
        m = tl.load(m_map + m.to(tl.int32)) * _spread(m_scales, ROWS, BLOCK)
        v = tl.load(v_map + v.to(tl.int32)) * _spread(v_scales, ROWS, BLOCK)
    if HAS_FACTOR:
        g = g * tl.load(factor).to(tl.float32)
    m = m + tl.load(scalars + 1) * (g - m)
    v = v + tl.load(scalars + 2) * (g * g - v)
    w = tl.fma(-tl.load(scalars), w, w)
    w = w - tl.load(scalars + 7) * m / tl.fma(tl.sqrt(v), tl.load(scalars + 8), tl.load(scalars + 4))
    tl.store(w_ptr + at, w.to(w_ptr.dtype.element_ty), mask=inside)
    if HAS_COPY:
        there = at
        if IS_CUT:
            there = at + _spread(row * BLOCK // piece * (stride - piece), ROWS, BLOCK)
            there = tl.max_contiguous(tl.multiple_of(there, BLOCK), BLOCK)
        tl.store(copy_ptr + there, w.to(copy_ptr.dtype.element_ty), mask=inside)
    if IS_NARROW:
        _pack(m, m_ptr, m_scale, m_bounds, at, row, inside, row_inside, True, ROWS, BLOCK)
        _pack(v, v_ptr, v_scale, v_bounds, at, row, inside, row_inside, False, ROWS, BLOCK)
    else:
        tl.store(m_ptr + at, m, mask=inside)
        tl.store(v_ptr + at, v, mask=inside)
