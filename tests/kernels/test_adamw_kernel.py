"""The kernel of one-pass AdamW without a GPU: what it computes and where it writes, by Triton's interpreter; how it
rounds, by its code for an H200."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from triton_kernels import interpret, ptx_for_h200

pytestmark = pytest.mark.triton

EPSILON = torch.finfo(torch.float32).eps
GROUP = {"betas": (0.9, 0.95), "lr": 3e-3, "weight_decay": 0.1, "eps": 1e-8}


def test_it_computes_what_its_plain_twin_does() -> None:
    interpret(__file__)


def compare(shape: tuple[int, ...], gradient_dtype: torch.dtype, clips: bool, is_cut: bool) -> None:
    """fp16 copies, which the interpreter rounds as a GPU does; `is_cut`: pieces of another tensor lie between
    theirs."""
    from shardwise.kernels.triton.adamw import update
    from shardwise.optim.fused_adamw import _scalars, plain_update

    draw = torch.Generator().manual_seed(0)
    master, gradient = (torch.randn(shape, generator=draw) for _ in range(2))
    first, second = (torch.rand(shape, generator=draw) for _ in range(2))
    beside = torch.full((shape[0], 2, *shape[1:]), 7.0, dtype=torch.float16)
    copy = beside[:, 0] if is_cut else torch.empty(shape, dtype=torch.float16)
    ours = [master, copy, gradient.to(gradient_dtype), first, second]
    before, theirs = ([tensor.clone() for tensor in ours] for _ in range(2))
    factor = torch.tensor(0.37, dtype=torch.float64) if clips else None
    update(*ours, _scalars(GROUP, 3), factor)
    plain_update(*theirs, _scalars(GROUP, 3), factor)
    # The interpreter rounds a product before it is added. Sums may cancel: they are exact to the size of their terms.
    g, change = gradient.abs(), (theirs[0] - before[0]).abs()
    for found, truth, terms in zip(ours[3:], theirs[3:], (before[3] + g, before[4] + g * g), strict=True):
        assert bool(((found - truth).abs() <= EPSILON * terms).all())
    assert bool(((master - theirs[0]).abs() <= EPSILON * (theirs[0].abs() + 4 * change)).all())
    assert torch.equal(copy, master.half()) and bool((beside[:, 1] == 7).all())


def test_every_rounding_is_the_exact_one() -> None:
    from shardwise.kernels.triton.adamw import _adamw

    wide = dict.fromkeys(("w_ptr", "m_ptr", "v_ptr", "scalars", "factor"), "*fp32")
    types = {"copy_ptr": "*bf16", "g_ptr": "*bf16"} | wide | dict.fromkeys(("size", "piece", "stride"), "i32")
    for is_cut in (False, True):
        ptx = ptx_for_h200(_adamw, types, HAS_FACTOR=True, IS_CUT=is_cut, BLOCK=1024)
        assert ptx.count("div.rn.f32") == 16 and ptx.count("sqrt.rn.f32") == 8 and ptx.count("fma.rn.f32") == 40
        assert not any(rough in ptx for rough in ("div.full", "approx"))
        assert ptx.count("ld.global.v4") >= 7  # 16 bytes at a time


if __name__ == "__main__":
    compare((7,), torch.float32, clips=False, is_cut=False)
    compare((100, 33), torch.bfloat16, clips=True, is_cut=False)
    compare((3, 16, 40), torch.bfloat16, clips=False, is_cut=True)
