"""The kernels of gated.py without a GPU: their results by Triton's interpreter, and their code for an H200."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

import torch
from test_gated import assert_rounded_once
from triton_kernels import interpret, ptx_for_h200

pytestmark = pytest.mark.triton


def test_they_compute_value_and_gradient() -> None:
    interpret(__file__)


def compare(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    from shardwise.kernels.triton.gated import backward, forward

    draw = torch.Generator().manual_seed(0)
    y_N2F = (3 * torch.randn(shape, generator=draw)).to(dtype)
    grad_NF = torch.randn(*shape[:-1], shape[-1] // 2, generator=draw).to(dtype)
    assert_rounded_once((forward(y_N2F), backward(grad_NF, y_N2F)), y_N2F, grad_NF)


def test_an_h200_reads_and_writes_16_bytes_at_a_time() -> None:
    from shardwise.kernels.triton import gated as gated_kernel

    y, h = {"y_ptr": "*bf16"}, {"h_ptr": "*bf16", "width": "i32"}
    ptx = ptx_for_h200(gated_kernel._forward, y | h, BLOCK=1024)
    assert (ptx.count("ld.global.v4"), ptx.count("st.global.v4")) == (2, 1)
    dy = {"dh_ptr": "*bf16", **y, "dy_ptr": "*bf16", "width": "i32"}
    ptx = ptx_for_h200(gated_kernel._backward, dy, BLOCK=1024)
    assert (ptx.count("ld.global.v4"), ptx.count("st.global.v4")) == (3, 2)


if __name__ == "__main__":
    compare((3, 1, 14), torch.float16)
    compare((2, 17, 2 * 1100), torch.float32)
    compare((0, 32), torch.float32)
