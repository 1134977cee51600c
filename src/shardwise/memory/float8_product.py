"""Matrix products in fp8: both factors are rounded to 8 bits with scales taken from their numbers at that moment, the sum is in fp32.

Every product of a linear layer is a b^T with the numbers that meet in rows of both: y = x W^T, dx = g (W^T)^T, dW = g^T (x^T)^T. So one
function rounds a matrix along its rows and one multiplies, whatever is transposed before. Recipes, as in torchao's float8 training:

    rowwise      a scale per row, a power of two; e4m3 for all three factors
    tensorwise   one scale per matrix; e4m3, and e5m2 for gradients, which have a wider range

Invariant: on CPUs, which have no such product, the same numbers are rounded to the same 8 bits and multiplied in fp32; the functions here are plain
tensor operations, so that a compiler makes one kernel of finding the scale, rounding and turning around. Read next: float8.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.model.fused_loss import Products
from shardwise.model.rounded import Rounded
from shardwise.plan.fp8 import MULTIPLE

NUMBERS, GRADIENTS = torch.float8_e4m3fn, {"rowwise": torch.float8_e4m3fn, "tensorwise": torch.float8_e5m2}
SMALLEST = 1e-30  # what the largest number of a row counts for at least: zeros have a scale too
EXPONENT = 0x7F800000  # of the bits of an fp32 number


def float8_mm(
    a_MK: Tensor,
    b_NK: Tensor,
    recipe: str,
    kind: torch.dtype = NUMBERS,
    *,
    fast: bool = False,
    compiled: bool = False,
) -> Tensor:
    """a b^T in the format of a. `kind`: what a is rounded to. `fast`: sums inside the tensor cores are not refreshed in fp32, which is
    exact enough for forward. `compiled`: roundings are kernels of their own, for products outside of compiled blocks."""
    if a_MK.shape[1] % MULTIPLE:  # tokens of a chunk; zeros add nothing
        a_MK, b_NK = (F.pad(x, (0, -x.shape[1] % MULTIPLE)) for x in (a_MK, b_NK))
    a8_MK, a_scale = _round(a_MK, kind, recipe, compiled)
    b8_NK, b_scale = _round(b_NK, NUMBERS, recipe, compiled)
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


def columns_rounded(x_KM: Tensor, kind: torch.dtype, recipe: str) -> tuple[Tensor, Tensor]:
    return rounded(x_KM.t(), kind, recipe)


def _round(x_MK: Tensor, kind: torch.dtype, recipe: str, compiled: bool) -> tuple[Tensor, Tensor]:
    if not compiled or torch.compiler.is_compiling():
        return rounded(x_MK, kind, recipe)
    if x_MK.stride(-1) == 1:
        return _compiled(rounded)(x_MK, kind, recipe)
    return _compiled(columns_rounded)(x_MK.t(), kind, recipe)


@cache
def _compiled(function: Callable) -> Callable:
    """For each shape, of which a head has three each way; a kernel for any shape would be slower."""
    return torch.compile(function, dynamic=False)


# Frozen weights -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def round_once(weight_OI: Tensor, recipe: str) -> Rounded:
    """Both ways that products read it. A scale is kept as what the bits are multiplied by."""
    rows_OI, rows_scale = rounded(weight_OI, NUMBERS, recipe)
    columns_IO, columns_scale = rounded(weight_OI.t(), NUMBERS, recipe)
    return Rounded(rows_OI, rows_scale.reciprocal(), columns_IO, columns_scale.reciprocal())


def _mm_frozen(a_MK: Tensor, b8_NK: Tensor, b_scale: Tensor, recipe: str, kind: torch.dtype, *, fast: bool) -> Tensor:
    """`float8_mm` of a factor that was rounded before."""
    a8_MK, a_scale = rounded(a_MK, kind, recipe)
    if not a_MK.is_cuda:
        return ((a8_MK.float() / a_scale) @ (b8_NK.float() * b_scale).t()).to(a_MK.dtype)
    scales = {"scale_a": a_scale.reciprocal(), "scale_b": b_scale.t()}
    return torch._scaled_mm(a8_MK, b8_NK.t(), **scales, out_dtype=a_MK.dtype, use_fast_accum=fast)


class _FrozenProduct(torch.autograd.Function):
    """Keeps nothing of x: the gradient of the weight would have been its only reader."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rows_OI: Tensor, rows_scale: Tensor, columns_IO: Tensor, columns_scale: Tensor, recipe: str
    ) -> Tensor:
        ctx.save_for_backward(columns_IO, columns_scale)
        ctx.recipe = recipe
        y_NO = _mm_frozen(x.flatten(0, -2), rows_OI, rows_scale, recipe, NUMBERS, fast=True)
        return y_NO.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        columns_IO, scale = ctx.saved_tensors
        g_NO, kind = gradient.flatten(0, -2), GRADIENTS[ctx.recipe]
        dx_NI = _mm_frozen(g_NO, columns_IO, scale, ctx.recipe, kind, fast=False)
        return dx_NI.unflatten(0, gradient.shape[:-1]), None, None, None, None, None


def _frozen_product(recipe: str, x: Tensor, weight: Rounded) -> Tensor:
    return _FrozenProduct.apply(x, *weight, recipe)


def frozen_product(recipe: str) -> partial[Tensor]:
    """(x, rounded weight) -> x W^T. Only x and the gradient of y are rounded at every step."""
    return partial(_frozen_product, recipe)


# Trained weights ------------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, recipe: str, compiled: bool) -> Tensor:
        ctx.save_for_backward(x, weight_OI)
        ctx.recipe, ctx.compiled = recipe, compiled
        y_NO = float8_mm(x.flatten(0, -2), weight_OI, recipe, fast=True, compiled=compiled)
        return y_NO.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight_OI = ctx.saved_tensors
        multiply = partial(float8_mm, recipe=ctx.recipe, kind=GRADIENTS[ctx.recipe], compiled=ctx.compiled)
        g_NO = gradient.flatten(0, -2)
        dx = multiply(g_NO, weight_OI.t()).view_as(x) if ctx.needs_input_grad[0] else None
        dw_OI = multiply(g_NO.t(), x.flatten(0, -2).t()) if ctx.needs_input_grad[1] else None
        return dx, dw_OI, None, None


def _product(recipe: str, compiled: bool, x: Tensor, weight_OI: Tensor) -> Tensor:
    return _Product.apply(x, weight_OI, recipe, compiled)


def float8_product(recipe: str, *, compiled: bool = False) -> partial[Tensor]:
    """(x, weight) -> x W^T, for use in the place of F.linear. Its gradients are fp8 products too."""
    return partial(_product, recipe, compiled)


class Float8Products(Products):
    """The same three for a head whose loss takes its gradients at once."""

    def __init__(self, recipe: str, *, compiled: bool):
        self.recipe, self.compiled, self.kind = recipe, compiled, GRADIENTS[recipe]

    def logits(self, x_ND: Tensor, weight_VD: Tensor) -> Tensor:
        return float8_mm(x_ND, weight_VD, self.recipe, fast=True, compiled=self.compiled)

    def input_gradient(self, grad_NV: Tensor, weight_VD: Tensor, out_ND: Tensor) -> None:
        out_ND.copy_(float8_mm(grad_NV, weight_VD.t(), self.recipe, self.kind, compiled=self.compiled))

    def weight_gradient(self, grad_NV: Tensor, x_ND: Tensor, sum_VD: Tensor, is_first: bool) -> None:
        """The product is rounded to 16 bits before it is added: the hardware's with scales per row has no wider result."""
        product_VD = float8_mm(grad_NV.t(), x_ND.t(), self.recipe, self.kind, compiled=self.compiled)
        sum_VD.copy_(product_VD) if is_first else sum_VD.add_(product_VD)
