"""The borders of tensor-parallel regions: collectives with their gradients.

A region begins where every rank needs all of its input (`enter`) and ends where the ranks' results are added up
(`leave`). Invariant: between the two, whatever a rank computes is a *partial* contribution, so the gradient of
anything replicated inside is a part that must be summed over the ranks. Outside, ranks hold the same tokens, or with
sequence parallelism each its own stretch of them. Read next: slices.py, which places the borders.

    split    nothing here: what is between the borders has a slice of each matrix (slices.py)
    held     with sequence parallelism, outside of regions, activations of 1/P of the tokens
    sent     an all-reduce per region and pass; with sequence parallelism an all-gather and a reduce-scatter instead

Shapes: B batch, T tokens, D model width, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.parallel.fsdp2 import all_gather_single, reduce_scatter_single
from shardwise.parallel.traffic import Wait, unseen


def share(total: int, parts: int, index: int) -> tuple[int, int]:
    """Returns the (start, stop) of part `index` of `total` units: parts are contiguous and as even as possible, the
    first ones get one more."""
    size, rest = divmod(total, parts)
    start = index * size + min(index, rest)
    return start, start + size + (index < rest)


@dataclass(eq=False)
class TensorParallel:
    """The ranks that share one model. `sequence`: outside regions they also share the tokens."""

    group: dist.ProcessGroup
    sequence: bool = False
    wait: Wait = unseen  # around each of their collectives
    size: int = field(init=False)
    index: int = field(init=False)
    active: bool = field(init=False, default=False)
    """Whether the pass that runs now splits its tokens; generation, one token at a time, cannot."""

    def __post_init__(self) -> None:
        self.size, self.index = self.group.size(), self.group.rank()

    def split(self, x_BT: Tensor) -> Tensor:
        """Returns this rank's stretch of tokens, (B, T / P), where the pass splits them, else all of them."""
        return x_BT.chunk(self.size, dim=1)[self.index] if self.active else x_BT


def enter(x_BTD: Tensor, tp: TensorParallel) -> Tensor:
    """Returns all tokens (B, T, D) on every rank, as a region needs them; backward adds the partial gradients up."""
    return _GatherTokens.apply(x_BTD, tp) if tp.active else _SumGradient.apply(x_BTD, tp)


def leave(x_BTD: Tensor, tp: TensorParallel) -> Tensor:
    """Returns the sum of all ranks' results at the end of a region, or this rank's stretch of it, where the pass splits
    the tokens."""
    return _ScatterTokens.apply(x_BTD, tp) if tp.active else _Sum.apply(x_BTD, tp)


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Returns x with a gradient that counts `factor` times: for what every rank computes in full inside a region."""
    return _ScaleGradient.apply(x, factor)


# Each of these is the other's backward, in pairs ---------------------------------------------------------------------


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.tp.group, wait=ctx.tp.wait), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        return all_reduce(x, tp.group, wait=tp.wait)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return gather_tokens(x, tp.group, tp.wait)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return scatter_tokens(grad, ctx.tp.group, ctx.tp.wait), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return scatter_tokens(x, tp.group, tp.wait)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gather_tokens(grad, ctx.tp.group, ctx.tp.wait), None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


# Plain collectives, out of place: autograd may hold the same tensor elsewhere ----------------------------------------


def all_reduce(x: Tensor, group: dist.ProcessGroup, op: Any = dist.ReduceOp.SUM, wait: Wait = unseen) -> Tensor:
    """Collective. Returns the sum (or another `op`) of all ranks' x, in a new tensor."""
    out = x.clone(memory_format=torch.contiguous_format)
    with wait("all-reduce", out.nbytes):
        dist.all_reduce(out, op=op, group=group)
    return out


def all_gather(x: Tensor, group: dist.ProcessGroup, wait: Wait = unseen) -> Tensor:
    """Collective. Returns all ranks' x, stacked in rank order along a new first dimension."""
    x = x.contiguous()
    out = x.new_empty(group.size(), *x.shape)
    with wait("all-gather", out.nbytes):
        all_gather_single(out.flatten(0, 1), x, group=group)
    return out


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, wait: Wait = unseen) -> Tensor:
    """Collective. Returns the sum of all ranks' entries for this rank; x has one entry per rank along dim 0."""
    x = x.contiguous()
    if not x.is_cuda:
        # gloo's own is an all-reduce and a slice: twice the bytes. Exchange the entries and add them here.
        out = torch.empty_like(x)
        with wait("reduce-scatter", x.nbytes):
            dist.all_to_all_single(out, x, group=group)
        return out.sum(0)
    out = torch.empty_like(x[0])
    with wait("reduce-scatter", x.nbytes):
        reduce_scatter_single(out, x.flatten(0, 1), group=group)
    return out


def gather_tokens(x_BTD: Tensor, group: dist.ProcessGroup, wait: Wait = unseen) -> Tensor:
    """Collective. Returns all tokens (B, T, D) from the ranks' stretches of them, in rank order."""
    return all_gather(x_BTD, group, wait).movedim(0, 1).flatten(1, 2)


def scatter_tokens(x_BTD: Tensor, group: dist.ProcessGroup, wait: Wait = unseen) -> Tensor:
    """Collective. Returns this rank's stretch (B, T / P, D) of the sum of all ranks' tokens."""
    return reduce_scatter(x_BTD.unflatten(1, (group.size(), -1)).movedim(1, 0), group, wait)
