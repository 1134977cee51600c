"""The kernel of norm_gradient.py without a GPU: its results by Triton's interpreter, and its code for an H200."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
import torch.nn.functional as F
from triton_kernels import interpret, ptx_for_h200, shared_bytes

pytestmark = pytest.mark.triton

EPS = 1e-5


def test_it_is_the_gradient_with_the_sums_around_it() -> None:
    interpret(__file__)


def compare(
    rows: int, width: int, terms: int, *, around: bool, learns: bool, dtype: torch.dtype = torch.float16
) -> None:
    """In fp16: the interpreter rounds bf16 towards zero."""
    from shardwise.kernels.triton.norm_gradient import backward

    draw = torch.Generator().manual_seed(0)
    x, *grads = (torch.randn(2, rows, width, generator=draw).to(dtype) for _ in range(terms + 2))
    weight = (1 + 0.1 * torch.randn(width, generator=draw)).to(dtype)
    x_wide, weight_wide = x.double().requires_grad_(), weight.double().requires_grad_()
    y = F.rms_norm(x_wide, (width,), weight_wide, EPS)
    truth, truth_weight = torch.autograd.grad(y, (x_wide, weight_wide), sum(one.double() for one in grads[:terms]))
    truth = truth + grads[terms].double() if around else truth
    scale = x.float().pow(2).mean(-1, keepdim=True).add(EPS).rsqrt()
    found, found_weight = backward(grads[:terms], grads[terms] if around else None, x, scale, weight, learns)
    assert torch.allclose(found.double(), truth, rtol=2**-10, atol=2**-12), (found.double() - truth).abs().max()
    assert (found != truth.to(dtype)).sum() <= 1e-2 * found.numel(), (
        "fp32 sums that lie between two values, and no others"
    )
    assert found_weight.shape == ((width,) if learns else (0,)) and found_weight.dtype == dtype
    if learns:
        assert torch.allclose(found_weight.double(), truth_weight, rtol=2**-10, atol=2**-10)


@pytest.mark.parametrize(("capability", "shared"), [(90, 232_448), (80, 166_912), (89, 101_376)])
@pytest.mark.parametrize("width", [520, 2048, 4096, 4160, 4608, 8256, 9216, 16384])
def test_rows_in_flight_fit_into_a_processor(
    width: int, capability: int, shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """H200, A100, L40S. A width that is no power of two takes as much as the next one."""
    from shardwise.kernels.triton import norm_gradient as kernel

    monkeypatch.setattr(kernel, "_properties", lambda _: (132, shared))
    wide = 1 << (width - 1).bit_length()
    for terms in (1, 4):
        _, stages = kernel.schedule(terms + 2, width, torch.empty(0, dtype=torch.bfloat16))
        constants = {"WIDTH": width, "TERMS": terms, "GOES_AROUND": True, "LEARNS": True, "EACH": 62, "WIDE": wide}
        options = {"num_warps": kernel.warps(wide)}
        assert shared_bytes(kernel._norm_gradient, types(), options, capability, **constants, STAGES=stages) <= shared


def types() -> dict[str, str]:
    """In the kernel's order."""
    from shardwise.kernels.triton.norm_gradient import _norm_gradient

    names = ("a_ptr", "b_ptr", "c_ptr", "d_ptr", "around_ptr", "x_ptr", "weight_ptr", "out_ptr")
    known = dict.fromkeys(names, "*bf16") | {"scale_ptr": "*fp32", "shares_ptr": "*fp32", "num_rows": "i32"}
    return {name: known[name] for name in _norm_gradient.arg_names if name in known}


def test_an_h200_moves_16_bytes_at_a_time_and_keeps_a_row_in_registers() -> None:
    from shardwise.kernels.triton import norm_gradient as kernel

    ptx = ptx_for_h200(
        kernel._norm_gradient, types(), {"num_warps": kernel.warps(4096)},
        WIDTH=4096, TERMS=3, GOES_AROUND=True, LEARNS=True, EACH=62, WIDE=4096, STAGES=kernel.STAGES,
    )  # fmt: skip
    assert "ld.global.v4" in ptx and "st.global.v4" in ptx
    assert ".local" not in ptx, "registers are spilled"


if __name__ == "__main__":
    compare(5, 64, 3, around=True, learns=True)
    compare(3, 48, 1, around=False, learns=True)
    compare(4, 40, 4, around=True, learns=False)
    compare(1, 16, 2, around=False, learns=False, dtype=torch.float16)
    compare(0, 16, 1, around=True, learns=True)
