"""Saves what a forward pass depends on besides its arguments, to be put back when it is repeated; and keeps tensors for
that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import _get_current_function_mode_stack


class Environment:
    """The state of random generators, autocast and torch-function modes (such as the one that defers weight gradients)
    at the moment it is made."""

    def __init__(self, device: torch.device | None, random: bool = True):
        self.kind = device.type if device is not None else "cpu"
        self.modes = _get_current_function_mode_stack()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind)) for kind in {"cpu", self.kind} if torch.is_autocast_enabled(kind)
        ]
        self.devices = [device] if random and device is not None and self.kind == "cuda" else []
        self.random = (
            [torch.get_rng_state(), *(torch.cuda.get_rng_state(one) for one in self.devices)] if random else []
        )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Puts all of that back while it is open; afterwards things are as before."""
        with ExitStack() as stack:
            for mode in self.modes:
                stack.enter_context(mode)
            for kind, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype))
            if self.random:
                stack.enter_context(torch.random.fork_rng(self.devices))
                torch.set_rng_state(self.random[0])
                for device, state in zip(self.devices, self.random[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield


class _Keep(torch.autograd.Function):
    """An operation that computes nothing and saves its inputs."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise AssertionError("nothing is computed from it")


def keep(tensors: Sequence[Tensor]) -> Tensor:
    """Saves tensors as an operation of the graph would: hooks of saved tensors see them, and changes in place are found
    out. Returns a handle from which `kept` takes them."""
    return _Keep.apply(torch.empty(0, requires_grad=True), *tensors)


def kept(handle: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors that `keep` saved."""
    assert handle.grad_fn is not None
    return handle.grad_fn.saved_tensors  # type: ignore[attr-defined]
