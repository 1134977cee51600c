"""The kernel of AdamW with 8-bit states: by Triton's interpreter, by its code for an H200, and on a GPU where there is
one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton_kernels import interpret, ptx_for_h200, round_once

from shardwise.kernels.low_bit_codes import BLOCK, bounds_of
from shardwise.kernels.low_bit_codes import nearest as plain_nearest
from shardwise.kernels.triton.low_bit_adamw import ROWS, _adamw8bit, nearest, update
from shardwise.optim.build import build_optimizer
from shardwise.optim.low_bit import is_quantized, load_torchao
from shardwise.optim.low_bit_update import plain_update, scalars_of
from shardwise.spec.schema import OptimizerConfig

pytestmark = pytest.mark.triton

EPSILON = torch.finfo(torch.float32).eps
GROUP = {"betas": (0.9, 0.95), "lr": 3e-3, "weight_decay": 0.1, "eps": 1e-8}

# Of the weights: shape, format of weights, gradients and copies; whether clipped; whether another tensor's pieces lie
# between those of the copy.
CASES = [
    ((48, 256), torch.float32, torch.bfloat16, torch.float16, True, False),
    ((17, 256), torch.float32, torch.float32, torch.float16, False, False),  # not a whole number of programs
    ((128, 48), torch.float16, torch.float16, None, True, False),
    ((16, 2, 256), torch.float32, torch.bfloat16, torch.float16, False, True),
    ((40, 3, 64), torch.float32, torch.bfloat16, torch.float16, False, True),  # pieces end within a block
    ((37, 111), torch.float32, torch.bfloat16, torch.float16, True, False),  # fp32 states
    ((3, 7), torch.float32, torch.float32, None, False, False),
]


def moments_of(shape: tuple[int, ...], device: str) -> tuple[Any, Any]:
    load_torchao()
    from torchao.optim.subclass_8bit import OptimState8bit

    if not is_quantized(torch.empty(shape, device="meta")):
        return torch.zeros(shape, device=device), torch.zeros(shape, device=device)
    return tuple(OptimState8bit.zeros(shape, signed, BLOCK, device) for signed in (True, False))  # type: ignore[return-value]


def parts_of(moment: Any) -> list[Tensor]:
    return [moment.codes, moment.scale] if hasattr(moment, "codes") else [moment]


def compare(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    gradient_dtype: torch.dtype,
    copy_dtype: torch.dtype | None,
    clips: bool,
    is_cut: bool,
    device: str = "cpu",
) -> None:
    """Each step begins with the plain values. Gradients of several sizes, some of them zero, so that blocks differ and
    all codes occur."""
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (torch.randn(shape, generator=draw.manual_seed(1)).to(device, dtype) for _ in range(2))
    beside = torch.full((shape[0], 2, *shape[1:]), 7.0, dtype=copy_dtype or dtype, device=device)
    copies = [None, None]
    if copy_dtype is not None:
        copies = [beside[:, 0] if is_cut else torch.empty(shape, dtype=copy_dtype, device=device), ours.to(copy_dtype)]
    found, truth = moments_of(shape, device), moments_of(shape, device)
    factor = torch.tensor(0.37, dtype=torch.float64, device=device) if clips else None
    for step in range(1, 5):
        gradient = torch.randn(shape, generator=draw) * 10.0 ** torch.randint(-4, 1, shape, generator=draw)
        gradient[-1] = 0
        gradient = gradient.to(device, gradient_dtype)
        before, scalars = theirs.float().clone(), scalars_of(GROUP, step, torch.device(device))
        update(ours, copies[0], gradient, factor, scalars, found)
        plain_update(theirs, copies[1], gradient, factor, scalars, truth)
        change = (theirs.float() - before).abs()
        limit = (
            torch.finfo(dtype).eps * theirs.abs().float() + 10 * EPSILON * change
        )  # so many roundings the change has
        assert bool(((ours.float() - theirs.float()).abs() <= limit).all())
        assert copies[0] is None or torch.equal(copies[0], ours.to(copy_dtype))
        assert bool((beside[:, 1] == 7).all())
        for one, other in zip(found, truth, strict=True):
            for mine, plain in zip(parts_of(one), parts_of(other), strict=True):
                assert torch.equal(mine, plain), (step, int((mine != plain).sum()))
        ours.copy_(theirs)


@triton.jit
def _codes(x_ptr, bounds, codes_ptr, size, IS_SIGNED: tl.constexpr):
    at = tl.program_id(0) * 256 + tl.arange(0, 256)
    x = tl.load(x_ptr + at, mask=at < size, other=0.0)
    tl.store(codes_ptr + at, nearest(x, bounds, IS_SIGNED).to(tl.uint8), mask=at < size)


def search(signed: bool, device: str = "cpu") -> None:
    """At every bound and just below: between them neither the code nor where it is looked for changes but upwards, so
    all values are tried."""
    values = moments_of((16, 256), device)[0 if signed else 1].qmap
    bounds = bounds_of(values)
    lowest = torch.tensor(-torch.inf, device=device)
    x = torch.cat([bounds[1:], bounds[1:].nextafter(lowest), values, torch.linspace(0, 1, 1001, device=device)])
    x = x[(x >= (-1 if signed else 0)) & (x <= 1)].contiguous()
    codes = torch.empty(x.shape, dtype=torch.uint8, device=device)
    _codes[(triton.cdiv(x.numel(), 256),)](x, bounds, codes, x.numel(), signed)
    assert torch.equal(codes, plain_nearest(x, values))


@pytest.mark.needs("torchao")
def test_it_computes_what_plain_operations_do() -> None:
    interpret(__file__)


def test_its_code_for_an_h200_rounds_and_reads_as_it_should() -> None:
    types = {"copy_ptr": "*bf16", "g_ptr": "*bf16", "m_ptr": "*u8", "v_ptr": "*u8"}
    types |= dict.fromkeys(("w_ptr", "factor", "scalars"), "*fp32") | dict.fromkeys(("size", "piece", "stride"), "i64")
    types |= dict.fromkeys([f"{m}_{part}" for m in "mv" for part in ("scale", "map", "bounds")], "*fp32")
    flags = {"HAS_FACTOR": True, "HAS_COPY": True, "IS_NARROW": True, "ROWS": ROWS, "BLOCK": BLOCK}
    for is_cut in (False, True):
        ptx = ptx_for_h200(_adamw8bit, types, options={"enable_fp_fusion": False}, IS_CUT=is_cut, **flags)
        # Eight elements per thread. Per moment, the exact inverse of a scale, seven lines and a corrected quotient; the
        # rest is the weight's.
        assert ptx.count("div.rn.f32") == 2 and ptx.count("div.full.f32") == ptx.count("sqrt.approx") == 8
        assert ptx.count("fma.rn.f32") == 8 * (2 * (7 + 2) + 2)
        assert ptx.count("ld.global.v4") >= 3 and ptx.count("st.global.v4") >= 3  # 16 bytes at a time
        assert ptx.count("ld.shared") <= 8  # threads keep their elements: looking up a code does not move them


@pytest.mark.cuda
@pytest.mark.needs("torchao")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_on_a_gpu_it_computes_what_plain_operations_do(case: Any) -> None:
    compare(*case, device="cuda")


@pytest.mark.cuda
@pytest.mark.needs("torchao")
def test_on_a_gpu_copies_in_bf16_are_rounded_once() -> None:
    compare((48, 256), torch.float32, torch.bfloat16, torch.bfloat16, True, False, device="cuda")


@pytest.mark.cuda
@pytest.mark.needs("torchao")
@pytest.mark.parametrize("signed", [True, False])
def test_on_a_gpu_every_code_begins_where_it_should(signed: bool) -> None:
    search(signed, "cuda")


@pytest.mark.cuda
@pytest.mark.needs("torchao")
def test_a_number_that_is_not_finite_is_not_hidden() -> None:
    """Its block's scale has it, as with plain operations."""
    weight, gradient = torch.zeros(32, 256, device="cuda"), torch.ones(32, 256, device="cuda")
    moments = moments_of((32, 256), "cuda")
    gradient[3, 7] = torch.nan
    update(weight, None, gradient, None, scalars_of(GROUP, 1, weight.device), moments)
    assert all(bool(moment.scale[3].isnan()) and int(moment.scale.isnan().sum()) == 1 for moment in moments)
    assert bool(weight[3, 7].isnan()) and int(weight.isnan().sum()) == 1


@pytest.mark.cuda
@pytest.mark.needs("torchao")
def test_a_tensor_of_more_than_2_to_the_31_numbers() -> None:
    size = 2**31 + 4096
    if torch.cuda.mem_get_info()[0] < 20 * size:
        pytest.skip("needs 43 GB of GPU memory")
    weight = torch.ones(size, device="cuda")
    copy, gradient = (torch.zeros(size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    gradient[-4096:] = torch.randn(4096, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    found, truth = moments_of((size,), "cuda"), moments_of((4096,), "cuda")
    scalars, expected = scalars_of(GROUP, 1, weight.device), torch.ones(4096, device="cuda")
    update(weight, copy, gradient, None, scalars, found)
    plain_update(expected, None, gradient[-4096:], None, scalars, truth)
    assert torch.allclose(weight[-4096:], expected, rtol=1e-6) and torch.equal(copy[-4096:], weight[-4096:].bfloat16())
    assert all(torch.equal(one.codes[-4096:], other.codes) for one, other in zip(found, truth, strict=True))


@pytest.mark.cuda
@pytest.mark.needs("torchao")
def test_an_update_takes_no_memory_and_waits_for_nothing() -> None:
    ours = [nn.Parameter(torch.randn(shape, device="cuda")) for shape in ((2048, 2048), (1000, 333), (4096,), (7,))]
    low_precision_of = {p: nn.Parameter(p.detach().bfloat16()) for p in ours}
    optimizer: Any = build_optimizer(OptimizerConfig(name="adamw8bit"), ours, low_precision_of)
    for step in (1, 2):
        for p in ours:
            low_precision_of[p].grad = torch.randn_like(low_precision_of[p])
        optimizer.grad_factor = torch.tensor(0.5, device="cuda")
        if step == 1:  # compiles the kernel, makes the moments
            optimizer.step()
            continue
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before <= 4096  # the scalars of each group
        assert torch.cuda.memory_allocated() < before  # gradients are gone


if __name__ == "__main__":
    round_once()
    for is_signed in (True, False):
        search(is_signed)
    for case in CASES:
        compare(*case)
