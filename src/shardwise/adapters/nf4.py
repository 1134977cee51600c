"""Keeps weights in four bits: NF4 with double quantization (QLoRA, arXiv 2305.14314, section 3), as tensors that can be
cut.

Of a row of the matrix, every 64 elements are divided by their largest magnitude and quantized to one of 16 values; the
magnitudes of a row, less their mean, are quantized to one of 256 values times one scale. A row is complete in itself:
FSDP2 and tensor parallelism take rows as they are, and columns in pairs of blocks. The codes and their order are
bitsandbytes', bit by bit (a test compares them); its own functions take whole tensors, no fp64, and seconds to import
on every rank. Invariant: the three tensors hold bits, not values. They are views in a 16-bit format, because FSDP2 of
torch 2.11 takes no bytes; they are all-gathered and copied, never cast, added or trained.

Shapes: O outputs, I inputs, P inputs padded to pairs of blocks, K = P / 64 blocks of a row.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK = 64
PAIR = 2 * BLOCK  # two magnitudes of 8 bits make one element of 16: columns are cut here
LEAVES = ("weight_nf4", "weight_absmax", "weight_scale")
CHUNK = 2**24  # weights that are read at once: bounds what reading needs beside its result

# Quantiles of a normal distribution, scaled to [-1, 1]: QLoRA, appendix E.
CODE = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class PackedWeight(NamedTuple):
    """A weight as bits, in a 16-bit format."""

    codes: Tensor  # [O, P / 4]: four codes of 4 bits each
    absmax: Tensor  # [O, K / 2]: two codes of 8 bits each
    scale: Tensor  # [O, 4]: scale and mean of the row's magnitudes, fp32 each


def packed_shapes(outputs: int, inputs: int) -> tuple[tuple[int, int], ...]:
    """Returns the shapes of the three tensors of a packed weight."""
    pairs = -(-inputs // PAIR)
    return (outputs, pairs * PAIR // 4), (outputs, pairs), (outputs, 4)


def packed_bytes(outputs: int, inputs: int) -> int:
    return sum(2 * rows * columns for rows, columns in packed_shapes(outputs, inputs))


@torch.no_grad()
def quantize(weight_OI: Tensor, container: torch.dtype) -> PackedWeight:
    outputs, inputs = weight_OI.shape
    if weight_OI.is_meta:
        shapes = packed_shapes(outputs, inputs)
        return PackedWeight(*(torch.empty(shape, dtype=container, device="meta") for shape in shapes))
    wide_OP = F.pad(weight_OI.float(), (0, -inputs % PAIR)).contiguous()
    # 1. Magnitudes of the blocks, and those less their mean, quantized. Padding says nothing about a row.
    absmax_OK = wide_OP.unflatten(1, (-1, BLOCK)).abs().amax(-1)
    num_real = -(-inputs // BLOCK)
    mean_O1 = absmax_OK[:, :num_real].double().mean(1, keepdim=True).float()  # the same on every device
    spread_OK = absmax_OK - mean_O1
    scale_O1 = spread_OK[:, :num_real].abs().amax(1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    quantized_OK = _nearest((spread_OK / scale_O1).clamp(-1, 1), table())
    # 2. The elements themselves, in blocks along the rows.
    smallest = torch.finfo(torch.float32).tiny  # a block of zeros is divided by something
    codes_OP = _nearest(
        wide_OP.unflatten(1, (-1, BLOCK)) / absmax_OK.clamp(min=smallest)[..., None], torch.tensor(CODE)
    )
    upper, lower = codes_OP.view(outputs, -1, 2).unbind(-1)
    parts = (upper << 4 | lower, quantized_OK, torch.cat([scale_O1, mean_O1], 1).view(torch.uint8))
    return PackedWeight(*(part.contiguous().view(container) for part in parts))


@torch.no_grad()
def dequantize(packed: PackedWeight, inputs: int, dtype: torch.dtype, first: int = 0) -> Tensor:
    """Returns `inputs` columns of the weight from column `first` on: a slice may begin inside a pair of blocks."""
    columns = slice(first, first + inputs)
    if torch.compiler.is_compiling():  # one kernel, with nothing beside its result
        return _read(packed)[:, columns].to(dtype, memory_format=torch.contiguous_format)
    outputs, rows = packed.codes.shape[0], max(1, CHUNK // max(4 * packed.codes.shape[1], 1))
    result_OI = torch.empty(outputs, inputs, dtype=dtype, device=packed.codes.device)
    for start in range(0, outputs, rows):
        part = PackedWeight(*(tensor[start : start + rows] for tensor in packed))
        result_OI[start : start + rows] = _read(part)[:, columns]
    return result_OI


def _read(packed: PackedWeight) -> Tensor:
    scale_O2 = packed.scale.contiguous().view(torch.float32)
    magnitudes, pairs = tables(packed.codes.device)
    absmax_OK = _look_up(magnitudes, packed.absmax.contiguous().view(torch.uint8)) * scale_O2[:, :1] + scale_O2[:, 1:]
    values_OP = _look_up(pairs, packed.codes.contiguous().view(torch.uint8)).flatten(1)
    values_OP.unflatten(1, (-1, BLOCK)).mul_(absmax_OK[..., None])
    return values_OP


def nf4_linear(x: Tensor, packed: PackedWeight, first: int) -> Tensor:
    """Returns x W^T. Backward reads W again, so that nothing but the bits is kept. A compiler would see that it has
    read W before, and keep it, unless it is told not to."""
    if torch.compiler.is_compiling():
        return checkpoint(_linear, x, *packed, first, use_reentrant=False, preserve_rng_state=False)
    return _Nf4Linear.apply(x, *packed, first)


def _linear(x: Tensor, codes: Tensor, absmax: Tensor, scale: Tensor, first: int) -> Tensor:
    return F.linear(x, dequantize(PackedWeight(codes, absmax, scale), x.shape[-1], x.dtype, first))


class _Nf4Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, absmax: Tensor, scale: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(codes, absmax, scale)
        ctx.inputs, ctx.first, ctx.dtype = x.shape[-1], first, x.dtype
        return _linear(x, codes, absmax, scale, first)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        weight_OI = dequantize(PackedWeight(*ctx.saved_tensors), ctx.inputs, ctx.dtype, ctx.first)
        return gradient @ weight_OI, None, None, None, None


# Tables ---------------------------------------------------------------------------------------------------------------


@cache
def table() -> Tensor:
    """Returns the 256 values of bitsandbytes' dynamic 8-bit format (arXiv 2110.02861, section 2.2), ascending."""
    values = [torch.tensor([0.0, 1.0])]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = 10 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2)
        values += [middles, -middles]
    return torch.cat(values).sort().values


@cache
def _pairs() -> Tensor:
    """Returns both values of every byte: the first is in its upper half."""
    code = torch.tensor(CODE)
    return torch.stack([code.repeat_interleave(16), code.repeat(16)], 1)


def _nearest(x: Tensor, values: Tensor) -> Tensor:
    middles = ((values[1:] + values[:-1]) / 2).to(x.device)
    return torch.bucketize(x, middles, out_int32=True).to(torch.uint8)


_TABLES: dict[str, tuple[Tensor, Tensor]] = {}  # by device: the 256 values, and the pairs of every byte


def tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns both tables on a device; they are made once. Who compiles asks before: a compiled block takes what is
    there and keeps nothing."""
    if str(device) in _TABLES:
        return _TABLES[str(device)]
    made = table().to(device), _pairs().to(device)
    if not torch.compiler.is_compiling():
        _TABLES[str(device)] = made
    return made


def _look_up(values: Tensor, bytes_: Tensor) -> Tensor:
    return values.index_select(0, bytes_.flatten().int()).view(*bytes_.shape, *values.shape[1:])
