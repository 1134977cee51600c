"""Weight gradients for later: what zero-bubble schedules need to split a backward pass in two.

While a forward pass runs under `deferring(todo)`, every matmul with a parameter is recorded by a function whose
backward computes the gradient towards its input and only *notes* the pair (input, output gradient) in `todo`.
`finish(todo)` multiplies the pairs later. Everything else (norms, biases, embeddings, experts) gets its gradient in
the first half: exact, only less filling for a bubble. The second half needs no parameter values, so sharded
parameters need not be gathered again for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Todo = list[tuple[nn.Parameter, Tensor, Tensor]]  # weight, input, gradient of the output


class deferring(TorchFunctionMode):
    """The mode under which weight gradients are noted instead of computed. A block that is recomputed runs under the
    modes of its forward pass (memory/environment.py), this one too."""

    def __init__(self, todo: Todo):
        super().__init__()
        self.todo = todo

    def __torch_function__(
        self, func: Callable, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled():
            x, weight, bias = (*args, *kwargs.values(), None)[:3] if not kwargs else _named(*args, **kwargs)
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                return _Linear.apply(x, weight, bias, self.todo)
        return func(*args, **kwargs)


def _named(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, todo: Todo) -> Tensor:
        ctx.save_for_backward(x)
        # The parameter itself: a saved tensor may come back as a copy, when its block was computed again.
        ctx.weight, ctx.todo = weight, todo
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        ctx.todo.append((weight, x.detach(), gradient.detach()))
        x_gradient = gradient @ weight if ctx.needs_input_grad[0] else None
        bias_gradient = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        return x_gradient, None, bias_gradient, None


@torch.no_grad()
def finish(todo: Todo) -> None:
    """Runs the other half of a backward pass: adds the gradient of each noted weight to what it has."""
    for weight, x, gradient in todo:
        whole = gradient.flatten(0, -2).t() @ x.flatten(0, -2)
        weight.grad = whole if weight.grad is None else weight.grad.add_(whole)
    todo.clear()
