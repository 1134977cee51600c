"""The kernel of fused_update.py, in Triton. Imported only where there is CUDA.

    w <- w - lr decay w        m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g g
    w <- w - lr / (1 - b1^t) m / (sqrt(v) / sqrt(1 - b2^t) + eps)        copy <- w, rounded

Invariant: torch's fused AdamW rounds at the same places, so one continues what the other began. Like there, what has a constant in it is
computed in fp64: memory is waited for longer. Division and root are the exact ones.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # numbers of one program: two reads of 16 bytes per thread and fp32 tensor


def update(
    master: Tensor,
    copy: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    scalars: Tensor,
    factor: Tensor | None,
) -> None:
    """In place: all but the last two and the gradient, which is multiplied by `factor` first."""
    assert all(tensor.is_contiguous() for tensor in (master, first, second))
    gradient, size = gradient.contiguous(), master.numel()
    if not size:
        return
    is_cut = not copy.is_contiguous()  # it lies piece by piece between pieces of another (model/experts.py)
    assert not is_cut or copy[0].is_contiguous(), copy.stride()
    piece, stride = (copy[0].numel(), copy.stride(0)) if is_cut else (size, size)
    has_factor = factor is not None
    _adamw[(triton.cdiv(size, BLOCK),)](
        master, copy, gradient, first, second, scalars, factor if has_factor else scalars, size, piece, stride,
        has_factor, is_cut, BLOCK,
    )  # fmt: skip


@triton.jit
def _adamw(
    w_ptr, copy_ptr, g_ptr, m_ptr, v_ptr, scalars, factor, size, piece, stride,
    HAS_FACTOR: tl.constexpr, IS_CUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    decay, beta1, rest1 = tl.load(scalars), tl.load(scalars + 1), tl.load(scalars + 2)
    beta2, rest2 = tl.load(scalars + 3), tl.load(scalars + 4)
    rate, root, eps = tl.load(scalars + 5).to(tl.float32), tl.load(scalars + 6).to(tl.float32), tl.load(scalars + 7)
    g = tl.load(g_ptr + at, mask=inside).to(tl.float32)
    if HAS_FACTOR:
        g = g * tl.load(factor).to(tl.float32)
    w = tl.load(w_ptr + at, mask=inside)
    m = tl.load(m_ptr + at, mask=inside)
    v = tl.load(v_ptr + at, mask=inside)
    g64, w64 = g.to(tl.float64), w.to(tl.float64)
    w = (w64 - decay * w64).to(tl.float32)
    m = (beta1 * m.to(tl.float64) + rest1 * g64).to(tl.float32)
    v = (beta2 * v.to(tl.float64) + rest2 * g64 * g64).to(tl.float32)
    below = (tl.div_rn(tl.sqrt_rn(v), root).to(tl.float64) + eps).to(tl.float32)
    w = w - tl.div_rn(rate * m, below)
    tl.store(w_ptr + at, w, mask=inside)
    tl.store(m_ptr + at, m, mask=inside)
    tl.store(v_ptr + at, v, mask=inside)
    if IS_CUT:
        at = at // piece * stride + at % piece
    tl.store(copy_ptr + at, w.to(copy_ptr.dtype.element_ty), mask=inside)
