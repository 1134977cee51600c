"""Computes matmuls in fp8: both factors are quantized to 8 bits with scales taken from their elements; sums are in
fp32.

Every matmul of a linear layer is a b^T with the elements that meet in rows of both: y = x W^T, dx = g (W^T)^T, dW = g^T
(x^T)^T. So one function quantizes a matrix along its rows and one multiplies, whatever is transposed before. Recipes,
as in torchao's float8 training:

    rowwise      a scale per row, a power of two; e4m3 for all three factors
    tensorwise   one scale per matrix; e4m3, and e5m2 for gradients, which have a wider range

Invariant: on CPUs, which have no such matmul, the same elements are quantized to the same 8 bits and multiplied in
fp32; the functions here are plain tensor operations, so that a compiler makes one kernel of finding the scale,
quantizing and transposing. Read next: `float8.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.kernels.fused_loss import HeadMatmuls
from shardwise.kernels.quantized_weight import QuantizedWeight
from shardwise.spec.fp8 import MULTIPLE

VALUES, GRADIENTS = torch.float8_e4m3fn, {"rowwise": torch.float8_e4m3fn, "tensorwise": torch.float8_e5m2}
SMALLEST = 1e-30  # the least that the largest element of a row counts for: zeros have a scale too
EXPONENT = 0x7F800000  # the bits of an fp32 number that are its exponent


def float8_mm(
    a_MK: Tensor,
    b_NK: Tensor,
    recipe: str,
    kind: torch.dtype = VALUES,
    *,
    fast: bool = False,
    compiled: bool = False,
) -> Tensor:
    """Returns a b^T in the format of a. `kind` is what a is quantized to. With `fast` sums inside the tensor cores are
    not refreshed in fp32, which is exact enough for forward. With `compiled` quantizing is a kernel of its own, for
    matmuls outside of compiled blocks."""
    a_MK, b_NK = _padded(a_MK), _padded(b_NK)  # tokens of a chunk; zeros add nothing
    return _multiply(
        _quantize(a_MK, kind, recipe, compiled), _quantize(b_NK, VALUES, recipe, compiled), a_MK.dtype, fast
    )


def _multiply(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype, fast: bool) -> Tensor:
    """Returns a b^T, both as `quantize_rows` returns them."""
    (a8_MK, a_scale), (b8_NK, b_scale) = a, b
    if not a8_MK.is_cuda:
        return ((a8_MK.float() / a_scale) @ (b8_NK.float() / b_scale).t()).to(dtype)
    scales = {"scale_a": a_scale.reciprocal(), "scale_b": b_scale.reciprocal().t()}
    return torch._scaled_mm(a8_MK, b8_NK.t(), **scales, out_dtype=dtype, use_fast_accum=fast)


def quantize_rows(x_MK: Tensor, kind: torch.dtype, recipe: str) -> tuple[Tensor, Tensor]:
    """Returns the quantized elements, in rows that lie together, and the scale that they were multiplied by."""
    if recipe == "rowwise":
        largest = x_MK.abs().amax(-1, keepdim=True)
    else:
        # First of what lies together: a compiler's kernels for that are faster than those for all at once, by 11 % of
        # all elementwise time.
        largest = x_MK.abs().amax(-1 if x_MK.stride(-1) == 1 else 0).amax()
    most = torch.finfo(kind).max
    # In fp64: compiled and not, a quotient has the same bits.
    scale = (most / largest.double().clamp(min=SMALLEST)).float()
    if recipe == "rowwise":
        scale = (scale.view(torch.int32) & EXPONENT).view(torch.float32)
    return (x_MK.float() * scale).clamp(-most, most).to(kind).contiguous(), scale


def quantize_columns(x_KM: Tensor, kind: torch.dtype, recipe: str) -> tuple[Tensor, Tensor]:
    return quantize_rows(x_KM.t(), kind, recipe)


def _quantize(x_MK: Tensor, kind: torch.dtype, recipe: str, compiled: bool) -> tuple[Tensor, Tensor]:
    if not compiled or torch.compiler.is_compiling():
        return quantize_rows(x_MK, kind, recipe)
    if x_MK.stride(-1) == 1:
        return _compiled(quantize_rows)(x_MK, kind, recipe)
    return _compiled(quantize_columns)(x_MK.t(), kind, recipe)


@cache
def _compiled(function: Callable) -> Callable:
    """Returns the function compiled for each shape, of which a head has three each way; a kernel for any shape would be
    slower."""
    return torch.compile(function, dynamic=False)


# Frozen weights -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def quantize_weight(weight_OI: Tensor, recipe: str) -> QuantizedWeight:
    """Returns the weight in both layouts that matmuls read. A scale is kept as what the bits are multiplied by."""
    rows_OI, rows_scale = quantize_rows(weight_OI, VALUES, recipe)
    columns_IO, columns_scale = quantize_rows(weight_OI.t(), VALUES, recipe)
    return QuantizedWeight(rows_OI, rows_scale.reciprocal(), columns_IO, columns_scale.reciprocal())


def _mm_frozen(
    a_MK: Tensor, b8_NK: Tensor, b_scale: Tensor, recipe: str, kind: torch.dtype, *, fast: bool, compiled: bool
) -> Tensor:
    """Returns what `float8_mm` does, with a factor that was quantized before."""
    a8_MK, a_scale = _quantize(a_MK, kind, recipe, compiled)
    if not a_MK.is_cuda:
        return ((a8_MK.float() / a_scale) @ (b8_NK.float() * b_scale).t()).to(a_MK.dtype)
    scales = {"scale_a": a_scale.reciprocal(), "scale_b": b_scale.t()}
    return torch._scaled_mm(a8_MK, b8_NK.t(), **scales, out_dtype=a_MK.dtype, use_fast_accum=fast)


class _FrozenLinear(torch.autograd.Function):
    """Computes x W^T and keeps nothing of x: the gradient of the weight would have been its only reader."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rows_OI: Tensor,
        rows_scale: Tensor,
        columns_IO: Tensor,
        columns_scale: Tensor,
        recipe: str,
        compiled: bool,
    ) -> Tensor:
        ctx.save_for_backward(columns_IO, columns_scale)
        ctx.recipe, ctx.compiled = recipe, compiled
        y_NO = _mm_frozen(x.flatten(0, -2), rows_OI, rows_scale, recipe, VALUES, fast=True, compiled=compiled)
        return y_NO.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        columns_IO, scale = ctx.saved_tensors
        g_NO, kind = gradient.flatten(0, -2), GRADIENTS[ctx.recipe]
        dx_NI = _mm_frozen(g_NO, columns_IO, scale, ctx.recipe, kind, fast=False, compiled=ctx.compiled)
        return dx_NI.unflatten(0, gradient.shape[:-1]), None, None, None, None, None, None


def _frozen_linear(recipe: str, compiled: bool, x: Tensor, weight: QuantizedWeight) -> Tensor:
    return _FrozenLinear.apply(x, *weight, recipe, compiled)


def frozen_linear(recipe: str, *, compiled: bool = False) -> partial[Tensor]:
    """Returns a function (x, quantized weight) -> x W^T. Only x and the gradient of y are quantized at every step."""
    return partial(_frozen_linear, recipe, compiled)


# Trained weights ------------------------------------------------------------------------------------------------------


class _Float8Linear(torch.autograd.Function):
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


def _linear(recipe: str, compiled: bool, x: Tensor, weight_OI: Tensor) -> Tensor:
    return _Float8Linear.apply(x, weight_OI, recipe, compiled)


def float8_linear(recipe: str, *, compiled: bool = False) -> partial[Tensor]:
    """Returns a function (x, weight) -> x W^T, for use in the place of F.linear. Its gradients are fp8 matmuls too."""
    return partial(_linear, recipe, compiled)


class QuantizedHeadWeight:
    """A head's weight in eight bits as its two matmuls read it, each made when it is first wanted: a loss in many
    chunks quantizes its weight once."""

    def __init__(self, weight_VD: Tensor, recipe: str, compiled: bool):
        self.weight_VD, self.recipe, self.compiled = weight_VD, recipe, compiled

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        return _quantize(_padded(self.weight_VD), VALUES, self.recipe, self.compiled)

    @cached_property
    def columns(self) -> tuple[Tensor, Tensor]:
        if self.recipe == "tensorwise":  # the same scale, so the same bits
            bits_VD, scale = self.rows
            transpose = _compiled(transposed) if self.compiled else transposed
            return transpose(bits_VD, self.weight_VD.shape[1]), scale
        return _quantize(_padded(self.weight_VD.t()), VALUES, self.recipe, self.compiled)


def transposed(bits_VD: Tensor, width: int) -> Tensor:
    """Returns the first `width` columns as rows. They are moved as bytes, which every kernel can."""
    return _padded(bits_VD.view(torch.uint8)[:, :width].t()).contiguous().view(bits_VD.dtype)


def _padded(x_MK: Tensor) -> Tensor:
    return F.pad(x_MK, (0, -x_MK.shape[1] % MULTIPLE)) if x_MK.shape[1] % MULTIPLE else x_MK


class Float8HeadMatmuls(HeadMatmuls):
    """Computes the three matmuls of a head in fp8, where its loss computes its gradients at once. A frozen weight was
    quantized before."""

    def __init__(self, recipe: str, *, compiled: bool):
        self.recipe, self.compiled, self.kind = recipe, compiled, GRADIENTS[recipe]

    def prepared(self, weight: Tensor | QuantizedWeight) -> QuantizedHeadWeight | QuantizedWeight:
        return QuantizedHeadWeight(weight, self.recipe, self.compiled) if isinstance(weight, Tensor) else weight

    def logits(self, x_ND: Tensor, weight: QuantizedHeadWeight | QuantizedWeight) -> Tensor:
        if isinstance(weight, QuantizedWeight):
            return _mm_frozen(
                x_ND, weight.rows_OI, weight.rows_scale, self.recipe, VALUES, fast=True, compiled=self.compiled
            )
        x = _quantize(_padded(x_ND), VALUES, self.recipe, self.compiled)
        return _multiply(x, weight.rows, x_ND.dtype, fast=True)

    def input_gradient(self, grad_NV: Tensor, weight: QuantizedHeadWeight | QuantizedWeight, out_ND: Tensor) -> None:
        if isinstance(weight, QuantizedWeight):
            bits, scale = weight.columns_IO, weight.columns_scale
            out_ND.copy_(_mm_frozen(grad_NV, bits, scale, self.recipe, self.kind, fast=False, compiled=self.compiled))
            return
        grad = _quantize(_padded(grad_NV), self.kind, self.recipe, self.compiled)
        out_ND.copy_(_multiply(grad, weight.columns, grad_NV.dtype, fast=False))

    def weight_gradient(self, grad_NV: Tensor, x_ND: Tensor, sum_VD: Tensor, is_first: bool) -> None:
        """Adds to the sum. The result is rounded to 16 bits before it is added: the hardware's matmul with scales per
        row has no wider one."""
        part_VD = float8_mm(grad_NV.t(), x_ND.t(), self.recipe, self.kind, compiled=self.compiled)
        sum_VD.copy_(part_VD) if is_first else sum_VD.add_(part_VD)
