"""Implements the kernel of fused_loss.py in Triton: from a chunk's logits to their gradient in one launch. Imported
only where there is CUDA.

    s = sum of exp(x)        loss = log s - x_target        dx = exp(x) / s, less one at the target

One program has one row and goes over it twice. The second time it goes backwards and finds the row in the L2 cache:
logits are read from memory once and written once. Where ranks have parts of the vocabulary, each loop is a launch of
its own, and ranks combine theirs in between. Each of a row's WIDE lanes has a largest element and a sum of its own, so
that threads wait for each other only at the row's end. Invariant: everything is fp32 and is rounded when it is stored;
exponents are of two, and every sum is relative to a number that is subtracted exactly. Rows without a target are not
read.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

# A thread reads 16 bytes of each of a tile's lines, in 16 bits; 64 registers let a multiprocessor have two rows at
# once.
TALL, WIDE, WARPS = 4, 4096, 16
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
SMALL = tl.constexpr(0.5)  # below this |x|, exp(x) - 1 loses digits
PER_ROW = ["columns_ptr", "is_target_ptr", "is_here_ptr", "sums_ptr", "targets_ptr", "losses_ptr"]
"""Arguments that the kernel is compiled for at any address: chunks begin anywhere in these."""


def cross_entropy(
    logits_NV: Tensor,
    columns_N: Tensor,
    is_target_N: Tensor,
    is_here_N: Tensor,
    loss_N: Tensor,
    softcap: float,
    combine: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None,
    wants_gradient: bool,
) -> None:
    """Writes losses into `loss_N` and, where it is wanted, the gradient of their sum into the place of the logits."""
    tensors = (logits_NV, columns_N, is_target_N, is_here_N, loss_N)
    assert all(tensor.is_contiguous() for tensor in tensors), [tensor.stride() for tensor in tensors]
    sums_N = targets_N = loss_N  # not looked at

    def launch(sums: bool, gradient: bool) -> None:
        _cross_entropy[(len(logits_NV),)](
            logits_NV, columns_N, is_target_N, is_here_N, sums_N, targets_N, loss_N, softcap, logits_NV.shape[1],
            sums, gradient, combine is not None, softcap != 0, TALL, WIDE, num_warps=WARPS,
            debug=True, sanitize_overflow=False,  # only what is asserted below
        )  # fmt: skip

    if combine is None:
        return launch(sums=True, gradient=wants_gradient)
    sums_N, targets_N = torch.empty_like(loss_N), torch.empty_like(loss_N)
    launch(sums=True, gradient=False)
    sums_N, targets_N = (all_N.contiguous() for all_N in combine(sums_N, targets_N))
    launch(sums=False, gradient=wants_gradient)


@triton.jit(do_not_specialize=PER_ROW)
def _cross_entropy(
    logits_ptr, columns_ptr, is_target_ptr, is_here_ptr, sums_ptr, targets_ptr, losses_ptr, softcap,
    WIDTH: tl.constexpr, SUMS: tl.constexpr, GRADIENT: tl.constexpr, COMBINES: tl.constexpr, CAPS: tl.constexpr,
    TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * WIDTH  # may pass 2^31
    NUM_TILES: tl.constexpr = (WIDTH + TALL * WIDE - 1) // (TALL * WIDE)
    inside_tile = tl.arange(0, TALL)[:, None] * WIDE + tl.arange(0, WIDE)[None, :]
    if tl.load(is_target_ptr + row):
        is_here, column = tl.load(is_here_ptr + row), tl.load(columns_ptr + row)
        tl.device_assert((column >= 0) & (column < WIDTH) | (is_here == 0), "target: index out of bounds")
        target = tl.load(logits_ptr + column, mask=is_here, other=0).to(tl.float32)
        slope = 1.0
        if CAPS:
            target, slope = _cap(target, softcap)
        # 1. The sum of exponentials: 2^shift times `total`.
        if SUMS:
            shift, total = _sum(logits_ptr, softcap, inside_tile, WIDTH, NUM_TILES, CAPS, TALL, WIDE)
            loss = tl.log(total) - LN2 * tl.fma(target, LOG2E, -shift)
            shift += tl.log2(total)
            if COMBINES:
                tl.store(sums_ptr + row, shift * LN2)
                tl.store(targets_ptr + row, target)  # 0 where another rank has it
        else:
            total = tl.load(sums_ptr + row)
            loss = total - tl.load(targets_ptr + row)
            shift = total * LOG2E
        if not (SUMS and COMBINES):
            tl.store(losses_ptr + row, loss)
        # 2. Probabilities, less one at the target. That is computed apart: near 1, a 16-bit probability less one has
        # lost its digits.
        if GRADIENT:
            tl.debug_barrier()  # all threads have read the target's logit: it may be written over
            for tile in range(NUM_TILES):
                at = (NUM_TILES - 1 - tile) * TALL * WIDE + inside_tile
                x = tl.load(logits_ptr + at, mask=at < WIDTH, other=0, eviction_policy="evict_first").to(tl.float32)
                if CAPS:
                    x, slopes = _cap(x, softcap)
                p = tl.exp2(tl.fma(x, LOG2E, -shift))
                if CAPS:
                    p *= slopes
                p = p.to(logits_ptr.dtype.element_ty)
                tl.store(logits_ptr + at, p, mask=at < WIDTH, eviction_policy="evict_first")
            tl.debug_barrier()  # whoever wrote the target's probability is done
            tl.store(logits_ptr + column, (_expm1(-loss) * slope).to(logits_ptr.dtype.element_ty), mask=is_here)
    else:
        if SUMS and COMBINES:
            tl.store(sums_ptr + row, 0.0)
            tl.store(targets_ptr + row, 0.0)
        else:
            tl.store(losses_ptr + row, 0.0)
        if GRADIENT:
            zeros = tl.zeros([TALL, WIDE], logits_ptr.dtype.element_ty)
            for tile in range(NUM_TILES):
                at = tile * TALL * WIDE + inside_tile
                tl.store(logits_ptr + at, zeros, mask=at < WIDTH, eviction_policy="evict_first")


@triton.jit
def _sum(
    logits_ptr, softcap, inside_tile,
    WIDTH: tl.constexpr, NUM_TILES: tl.constexpr, CAPS: tl.constexpr, TALL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Returns (shift, total): the row's exponentials are 2^shift total together. A lane without a finite number yet has
    the shift -inf and the total 0."""
    shifts = tl.full([WIDE], float("-inf"), tl.float32)
    totals = tl.zeros([WIDE], tl.float32)
    for tile in range(NUM_TILES):
        at = tile * TALL * WIDE + inside_tile
        x = tl.load(logits_ptr + at, mask=at < WIDTH, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)
        if CAPS:
            x = tl.where(at < WIDTH, _cap(x, softcap)[0], float("-inf"))
        larger = tl.maximum(shifts, tl.max(x, 0) * LOG2E)
        exact = _finite(larger)
        totals = totals * tl.exp2(shifts - exact) + tl.sum(tl.exp2(tl.fma(x, LOG2E, -exact[None, :])), 0)
        shifts = larger
    shift = _finite(tl.max(shifts, 0))
    return shift, tl.sum(totals * tl.exp2(shifts - shift), 0)


@triton.jit
def _finite(shift):
    """Returns a number to subtract. Where there is nothing but -inf so far any will do, but -inf - -inf is none."""
    return tl.where(shift == float("-inf"), 0.0, shift)


@triton.jit
def _cap(x, softcap):
    """Returns softcap tanh(x / softcap), and its slope, which keeps its digits where it is small."""
    e = tl.exp2(tl.abs(x) * (-2 * LOG2E / softcap))
    share = 1 / (1 + e)
    capped = softcap * (1 - e) * share
    return tl.where(x < 0, -capped, capped), 4 * e * share * share


@triton.jit
def _expm1(x):
    """Returns exp(x) - 1 for x <= 0, by its series where that is small."""
    series = 1.0
    for term in tl.static_range(10, 1, -1):
        series = 1.0 + series * x * (1.0 / term)
    return tl.where(x > -SMALL, x * series, tl.exp2(x * LOG2E) - 1)
