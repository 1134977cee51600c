"""Matrix products in fp8: both factors are rounded to 8 bits with scales taken from their numbers at that moment, the sum is in fp32.

Every product of a linear layer is a b^T with the numbers that meet in rows of both: y = x W^T, dx = g (W^T)^T, dW = g^T (x^T)^T. So one
function rounds a matrix along its rows and one multiplies, whatever is transposed before. Recipes, as in torchao's float8 training:

    rowwise      a scale per row, a power of two; e4m3 for all three factors
    tensorwise   one scale per matrix; e4m3, and e5m2 for gradients, which have a wider range

Invariant: on CPUs, which have no such product, the same numbers are rounded to the same 8 bits and multiplied in fp32; the functions here are plain
tensor operations, so that a compiler makes one kernel of finding the scale, rounding and turning around. Read next: float8.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

NUMBERS, GRADIENTS = torch.float8_e4m3fn, {"rowwise": torch.float8_e4m3fn, "tensorwise": torch.float8_e5m2}
SMALLEST = 1e-30  # what the largest number of a row counts for at least: zeros have a scale too
EXPONENT = 0x7F800000  # of the bits of an fp32 number
MULTIPLE = 16  # of both sides of a matrix: what the hardware's products take


def float8_mm(a_MK: Tensor, b_NK: Tensor, recipe: str, kind: torch.dtype = NUMBERS, *, fast: bool = False) -> Tensor:
    """a b^T in the format of a. `kind`: what a is rounded to. `fast`: sums inside the tensor cores are not refreshed in fp32, which is
    exact enough for forward."""
    a8_MK, a_scale = rounded(a_MK, kind, recipe)
    b8_NK, b_scale = rounded(b_NK, NUMBERS, recipe)
    if not a_MK.is_cuda:
        return ((a8_MK.float() / a_scale) @ (b8_NK.float() / b_scale).t()).to(a_MK.dtype)
    scales = {"scale_a": a_scale.reciprocal(), "scale_b": b_scale.reciprocal().t()}
    return torch._scaled_mm(a8_MK, b8_NK.t(), **scales, out_dtype=a_MK.dtype, use_fast_accum=fast)


def rounded(x_MK: Tensor, kind: torch.dtype, recipe: str) -> tuple[Tensor, Tensor]:
    """In rows that lie together, and what the numbers were multiplied by."""
    largest = x_MK.abs().amax(-1, keepdim=True) if recipe == "rowwise" else x_MK.abs().amax()
    most = torch.finfo(kind).max
    scale = (
        most / largest.double().clamp(min=SMALLEST)
    ).float()  # fp64: compiled and not, a quotient has the same bits
    if recipe == "rowwise":
        scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return (x_MK.float() * scale).clamp(-most, most).to(kind).contiguous(), scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, recipe: str) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.recipe = recipe
        return float8_mm(x.flatten(0, -2), weight_OI, recipe, fast=True).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight_OI = ctx.saved_tensors
        kind = GRADIENTS[ctx.recipe]
        g_NO, dx, dw_OI = gradient.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            dx = float8_mm(g_NO, weight_OI.t(), ctx.recipe, kind).view_as(x)
        if ctx.needs_input_grad[1]:
            dw_OI = float8_mm(g_NO.t(), x.flatten(0, -2).t(), ctx.recipe, kind)
        return dx, dw_OI, None


def _product(recipe: str, x: Tensor, weight_OI: Tensor) -> Tensor:
    return _Product.apply(x, weight_OI, recipe)


def float8_product(recipe: str) -> partial[Tensor]:
    """(x, weight) -> x W^T, for use in the place of F.linear. Its gradients are fp8 products too."""
    return partial(_product, recipe)
