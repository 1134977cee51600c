"""Sums of squares of many tensors."""

from __future__ import annotations

import pytest
import torch
from triton_kernels import interpret

from shardwise.optim import gradient_norm as squares
from shardwise.optim.gradient_norm import LEAST_ELEMENTS, squared_norms


def test_small_and_large_ones_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(squares, "uses_kernel", lambda _: True)
    monkeypatch.setattr(squares, "_by_kernel", lambda tensors: tuple(t.double().square().sum() for t in tensors))
    tensors = [
        torch.full((size,), value)
        for size, value in ((3, 1.0), (LEAST_ELEMENTS, 2.0), (5, 3.0), (2 * LEAST_ELEMENTS, 0.5))
    ]
    found = squared_norms(tensors)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx([3.0, 4.0 * LEAST_ELEMENTS, 45.0, 0.5 * LEAST_ELEMENTS])


def test_16_bits_neither_overflow_nor_lose_digits() -> None:
    assert float(squared_norms([torch.full((4,), 6e4, dtype=torch.float16)])) == pytest.approx(4 * 6e4**2)
    draw = torch.Generator().manual_seed(0)
    tensor = torch.randn(1000, generator=draw).bfloat16()
    assert float(squared_norms([tensor])) == pytest.approx(float(tensor.double().square().sum()), rel=1e-5)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_kernel_and_torch_agree_on_a_gpu(dtype: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    sizes = [(7,), (1000, 1049), (3, LEAST_ELEMENTS), (4096, 4096), (5, 5)]
    tensors = [torch.randn(size, generator=draw, device="cuda").to(dtype) for size in sizes]
    tensors.append(torch.randn(2048, 2048, generator=draw, device="cuda").to(dtype).t())  # not in one piece
    truth = torch.stack([tensor.double().square().sum() for tensor in tensors])
    assert torch.allclose(squared_norms(tensors), truth, rtol=1e-6, atol=0)
    assert torch.equal(squared_norms(tensors), squared_norms(tensors)), "the same sum every time"


@pytest.mark.triton
def test_the_kernel_without_a_gpu() -> None:
    pytest.importorskip("triton")
    interpret(__file__)


if __name__ == "__main__":
    from shardwise.kernels.triton import gradient_norm as squares_kernel

    squares_kernel.PROGRAMS, squares_kernel.BLOCK = 4, 64
    ones = [
        torch.randn(size).to(dtype) for size, dtype in ((1000, torch.float16), (256, torch.float32), (3, torch.float32))
    ]
    for one, row in zip(ones, squares_kernel.shares(ones), strict=True):
        assert torch.allclose(row.double().sum(), one.double().square().sum(), rtol=1e-6), one.shape
