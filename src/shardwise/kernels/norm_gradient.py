"""Computes the backward pass of RMSNorm and the sums around it as one operation in compiled blocks:
`shardwise::norm_gradient`.

What a norm's result is used for (q, k, v; gate, up) sends back one gradient each, and the residual stream one more
around the norm. A compiler adds all of them in one kernel with the norm's own backward, but that kernel also sums the
weight's gradient over all rows, and runs at half of the memory's speed. On a GPU one kernel (`triton/norm_gradient.py`)
reads each gradient and x once and writes one. Forward is torch's own, in operations that a compiler fuses with what is
around.

    s = 1 / rms(x)     d = sum of gradients
    dx = s (d w - x s mean(d w x s)) + what goes around     dw = sum of d x s over rows

The operation starts with one gradient and none around; `GatherSums`, a pass over the graph, hands it the additions next
to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node

from shardwise.model.norm import RMSNorm
from shardwise.model.replacement import become

MOST_TERMS = 4  # terms of the sum that arrives: adapters' gradient beside q, k, v
SCHEMA = "(Tensor[] grads, Tensor? around, Tensor x, Tensor scale, Tensor weight, bool learns) -> (Tensor, Tensor)"


def apply_norm_gradients(modules: Iterable[nn.Module]) -> None:
    """Gives norms this backward pass, in place: those that are children of the given modules, which are blocks, and the
    model itself for its last one. The norms of heads, deeper inside, have short rows."""
    operation()
    for module in modules:
        for norm in module.children():
            if isinstance(norm, RMSNorm):
                become(norm, KernelNorm)


class KernelNorm(RMSNorm):
    """An RMSNorm whose backward is one operation, which adds what is around it where a pass over the graph says so
    (`GatherSums`)."""

    def forward(self, x: Tensor) -> Tensor:
        return kernel_norm(x, self.factor(), self.eps)


def kernel_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Returns torch's RMSNorm with the backward above; `operation` was called before."""
    return _KernelNorm.apply(x, weight_D, eps)


class _KernelNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y, scale = torch.ops.aten._fused_rms_norm(x, weight_D.shape, weight_D, eps)
        ctx.save_for_backward(x, scale, weight_D)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, scale, weight_D = ctx.saved_tensors
        learns = ctx.needs_input_grad[1]
        grad_x, grad_D = torch.ops.shardwise.norm_gradient([grad], None, x, scale, weight_D, learns)
        return grad_x, grad_D if learns else None, None


@cache
def operation() -> Any:
    """Returns `shardwise::norm_gradient`, which torch knows from the first call on."""
    contiguous = torch.Tag.needs_contiguous_strides
    torch.library.define("shardwise::norm_gradient", SCHEMA, lib=_here(), tags=(contiguous,))
    torch.library.impl("shardwise::norm_gradient", "CUDA", _with_kernel, lib=_here())
    torch.library.impl("shardwise::norm_gradient", "CPU", _by_definition, lib=_here())
    torch.library.register_fake("shardwise::norm_gradient", _shapes, lib=_here())
    return torch.ops.shardwise.norm_gradient.default


def _with_kernel(
    grads: list[Tensor], around: Tensor | None, x: Tensor, scale: Tensor, weight_D: Tensor, learns: bool
) -> tuple[Tensor, Tensor]:
    from shardwise.kernels.triton.norm_gradient import backward  # Triton takes seconds to load

    return backward(grads, around, x, scale, weight_D, learns)


def _by_definition(
    grads: list[Tensor], around: Tensor | None, x: Tensor, scale: Tensor, weight_D: Tensor, learns: bool
) -> tuple[Tensor, Tensor]:
    grad = torch.stack([one.view(x.shape).to(scale.dtype) for one in grads]).sum(0)
    normed, weighted = x * scale, grad * weight_D
    grad_x = scale * (weighted - normed * (weighted * normed).mean(-1, keepdim=True))
    grad_x = grad_x if around is None else grad_x + around.view(x.shape)
    grad_D = (grad * normed).flatten(0, -2).sum(0) if learns else grad.new_empty(0)
    return grad_x.to(x.dtype), grad_D.to(weight_D.dtype)


def _shapes(
    grads: list[Tensor], around: Tensor | None, x: Tensor, scale: Tensor, weight_D: Tensor, learns: bool
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weight_D.new_empty(weight_D.shape if learns else 0)


@cache
def _here() -> torch.library.Library:
    return torch.library.Library("shardwise", "FRAGMENT")


class GatherSums:
    """Makes additions part of a norm's backward: those whose result only it reads, and the one that alone reads its
    result."""

    def __init__(self) -> None:
        self.operation = operation()

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=self.operation):
            grads, around, *rest = node.args
            if len(grads) == 1 and around is None:  # not seen before
                node.args = (_terms(grads[0]), None, *rest)
                self._take_around(graph, node)
        graph.eliminate_dead_code()

    def _take_around(self, graph: Graph, node: Node) -> None:
        result = next((user for user in node.users if user.args[1] == 0), None)
        last = result and _after_views(result)
        total = _only_user(last) if last else None
        if total is None or last is None or not _is_sum(total):
            return
        around: Any = next(arg for arg in total.args if arg is not last)
        before = _before(graph, node)
        while around not in before and around.target in _views():
            around = around.args[0]
        if around in before:
            node.args = (node.args[0], around, *node.args[2:])
            total.replace_all_uses_with(last)

    def uuid(self) -> Any:
        """Returns what tells graphs apart that torch keeps on disk."""
        return ("shardwise norm sums", 1)


def _terms(value: Node) -> list[Node]:
    """Returns the terms that are added up to `value`, in that order; itself where it is no sum, or one of too many."""
    source = value
    while len(source.users) == 1 and source.target in _views():
        source = source.args[0]  # type: ignore[assignment]
    if not (len(source.users) == 1 and _is_sum(source)):
        return [value]
    terms = [term for part in source.args for term in _terms(part)]  # type: ignore[arg-type]
    return terms if len(terms) <= MOST_TERMS else [value]


def _is_sum(node: Node) -> bool:
    """Returns whether a node adds two tensors, element by element, in the format of both."""
    if (
        node.target is not torch.ops.aten.add.Tensor
        or node.kwargs
        or len(node.args) != 2
        or node.args[0] is node.args[1]
    ):
        return False
    kinds = {(one.meta["val"].shape, one.meta["val"].dtype) for one in (node, *node.args) if isinstance(one, Node)}
    return len(kinds) == 1 and all(isinstance(arg, Node) for arg in node.args)


def _after_views(node: Node) -> Node:
    user = _only_user(node)
    return _after_views(user) if user is not None and user.target in _views() else node


def _only_user(node: Node) -> Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _before(graph: Graph, node: Node) -> set[Node]:
    found: set[Node] = set()
    for one in graph.nodes:
        if one is node:
            return found
        found.add(one)
    raise AssertionError("a node is in its graph")


@cache
def _views() -> tuple[Any, ...]:
    aten = torch.ops.aten
    return aten.view.default, aten._unsafe_view.default, aten.reshape.default
