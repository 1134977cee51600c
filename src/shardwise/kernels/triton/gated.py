"""Implements the kernels of gated.py in Triton. Imported only where there is CUDA.

    s = sigmoid(gate)        h = gate s up        dup = dh gate s        dgate = dh up s (1 + gate (1 - s))

One program has BLOCK columns of one row: 16 bytes per thread and tensor in 16 bits. Everything is computed in fp32 and
rounded when it is stored.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def forward(y_N2F: Tensor) -> Tensor:
    y_N2F = y_N2F.contiguous()
    width = y_N2F.shape[-1] // 2
    h_NF = y_N2F.new_empty(*y_N2F.shape[:-1], width)
    if h_NF.numel():
        _forward[_grid(h_NF, width)](y_N2F, h_NF, width, BLOCK)
    return h_NF


def backward(grad_NF: Tensor, y_N2F: Tensor) -> Tensor:
    y_N2F, grad_NF = y_N2F.contiguous(), grad_NF.contiguous()
    width, out_N2F = grad_NF.shape[-1], torch.empty_like(y_N2F)
    if grad_NF.numel():
        _backward[_grid(grad_NF, width)](grad_NF, y_N2F, out_N2F, width, BLOCK)
    return out_N2F


def _grid(h_NF: Tensor, width: int) -> tuple[int, int]:
    """Returns the programs to launch: rows, and blocks of columns."""
    return h_NF.numel() // width, triton.cdiv(width, BLOCK)


@triton.jit
def _forward(y_ptr, h_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(y_ptr + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(y_ptr + row * 2 * width + width + column, mask=inside).to(tl.float32)
    tl.store(h_ptr + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


@triton.jit
def _backward(dh_ptr, y_ptr, dy_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    dh = tl.load(dh_ptr + row * width + column, mask=inside).to(tl.float32)
    gate = tl.load(y_ptr + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(y_ptr + row * 2 * width + width + column, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(dy_ptr + row * 2 * width + column, dh * up * s * (1 + gate * (1 - s)), mask=inside)
    tl.store(dy_ptr + row * 2 * width + width + column, dh * gate * s, mask=inside)
