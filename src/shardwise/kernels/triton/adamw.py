"""Implements the kernel of optim/fused_adamw.py in Triton. Imported only where there is CUDA.

    w <- w - lr decay w        m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g g
    w <- w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)        copy <- w, rounded

Invariant: torch's fused AdamW rounds at the same places, so one continues what the other began: constants are fp32 as
well, 1 - b of a number is x - b x in one rounding, and division and root are the exact ones.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements per program: two reads of 16 bytes per thread and fp32 tensor


def update(
    master: Tensor,
    low_precision: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    scalars: Tensor,
    factor: Tensor | None,
) -> None:
    """Updates master, low-precision weight and both moments in place. The gradient is multiplied by `factor` first."""
    assert all(tensor.is_contiguous() for tensor in (master, first, second))
    gradient, size = gradient.contiguous(), master.numel()
    if not size:
        return
    # Pieces of it may lie between pieces of another (kernels/fused_experts.py).
    is_cut = not low_precision.is_contiguous()
    assert not is_cut or low_precision[0].is_contiguous(), low_precision.stride()
    piece, stride = (low_precision[0].numel(), low_precision.stride(0)) if is_cut else (size, size)
    has_factor = factor is not None
    _adamw[(triton.cdiv(size, BLOCK),)](
        master, low_precision, gradient, first, second, scalars, factor if has_factor else scalars, size, piece, stride,
        has_factor, is_cut, BLOCK,
    )  # fmt: skip


@triton.jit
def _adamw(
    w_ptr, copy_ptr, g_ptr, m_ptr, v_ptr, scalars, factor, size, piece, stride,
    HAS_FACTOR: tl.constexpr, IS_CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    decay, beta1, beta2 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    rate, root, eps = tl.load(scalars + 3), tl.load(scalars + 4), tl.load(scalars + 5)
    g = tl.load(g_ptr + at, mask=inside).to(tl.float32)
    if HAS_FACTOR:
        g = g * tl.load(factor).to(tl.float32)
    w = tl.load(w_ptr + at, mask=inside)
    m = tl.load(m_ptr + at, mask=inside)
    v = tl.load(v_ptr + at, mask=inside)
    w = tl.fma(-decay, w, w)
    m = tl.fma(beta1, m, tl.fma(-beta1, g, g))
    gg = g * g
    v = tl.fma(beta2, v, tl.fma(-beta2, gg, gg))
    w = w - tl.div_rn(rate * m, tl.div_rn(tl.sqrt_rn(v), root) + eps)
    tl.store(w_ptr + at, w, mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
    if IS_CUT:
        at = at // piece * stride + at % piece
    tl.store(copy_ptr + at, w.to(copy_ptr.dtype.element_ty), mask=inside)
