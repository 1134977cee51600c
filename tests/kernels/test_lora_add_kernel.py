"""The kernel of lora_add.py without a GPU: its results by Triton's interpreter, and its code for an H200."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from triton_kernels import interpret, ptx_for_h200

pytestmark = pytest.mark.triton


def test_it_adds_a_low_rank_matmul() -> None:
    interpret(__file__)


def compare(rows: int, width: int, rank: int, beside: int = 0) -> None:
    """`beside`: columns of the matrix that x is a part of. In fp16: the interpreter rounds bf16 towards zero."""
    from shardwise.kernels.triton.lora_add import add

    draw = torch.Generator().manual_seed(0)
    y, wide, b = (
        torch.randn(size, generator=draw).half() for size in ((rows, width), (rows, rank + beside), (width, rank))
    )
    x = wide[:, beside:]
    truth = (y.double() + x.double() @ b.double().t()).half()
    found = add(y, x, b)
    assert (found != truth).sum() <= 1e-2 * found.numel(), "fp32 sums that lie between two values, and no others"
    assert torch.allclose(found.double(), truth.double(), rtol=2**-10, atol=2**-10)


def test_an_h200_multiplies_in_tensor_cores_and_moves_16_bytes_at_a_time() -> None:
    from shardwise.kernels.triton import lora_add as kernel

    pointers = dict.fromkeys(("y_ptr", "x_ptr", "b_ptr", "out_ptr"), "*bf16")
    sizes = dict.fromkeys(("num_rows", "width", "x_stride"), "i32")
    ptx = ptx_for_h200(
        kernel._lora_add, pointers | sizes, {"num_warps": kernel.WARPS},
        RANK=16, PADDED=16, TALL=kernel.TALL, WIDE=kernel.WIDE,
    )  # fmt: skip
    assert "mma.sync" in ptx and "ld.global.v4" in ptx and "st.global.v4" in ptx


if __name__ == "__main__":
    compare(70, 150, 16)
    compare(65, 128, 24, beside=8)
    compare(3, 7, 8)
    compare(0, 16, 16)
