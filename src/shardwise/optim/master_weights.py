"""Master weights: any optimizer runs over weights that a model has in 16 bits; it computes, and keeps its state, in
fp32.

torch's optimizers keep state in the format of the parameter and want gradients in it. In fp16 the second moment of
any gradient below 2e-4 is zero, so Adam divides by its epsilon, and unscaled gradients vanish before they are used.
Two cases, a few parameters at a time:

    fp16 alone      the inner optimizer has stand-ins for the parameters: fp32 tensors that exist while they are updated
    fp32 masters    it has the masters themselves and gets gradients in fp32; then the low-precision weights are written

Invariant: between steps a stand-in is empty, and `state[parameter]` is the inner optimizer's own entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]
LowPrecisionOf = Mapping[nn.Parameter, nn.Parameter]
"""Maps an fp32 master weight to the low-precision weight, in 16 bits, that the model computes with."""
BUCKET_ELEMENTS = 2**24  # elements that are cast at a time: 64 MiB of weights and 64 of gradients


class MasterWeights(torch.optim.Optimizer):
    """Is, from outside, an optimizer over the parameters; the inner one sees fp32 only."""

    grad_factor: Tensor | None = None  # what the next step multiplies gradients by, in fp32

    def __init__(
        self,
        groups: Groups,
        build: Callable[[Groups], torch.optim.Optimizer],
        low_precision_of: LowPrecisionOf = MappingProxyType({}),
    ):
        """`build` makes the inner optimizer of groups of parameters. A parameter that is no master is in 16 bits
        itself."""
        self.low_precision_of = low_precision_of
        inner = [
            {**group, "params": [p if p in low_precision_of else _stand_in(p) for p in group["params"]]}
            for group in groups
        ]
        self.inner = build(inner)
        super().__init__(groups, dict(self.inner.defaults))
        self._empty()
        self._show_state()  # Adagrad's is there from the start

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            yield from zip(own["params"], inner["params"], strict=True)

    def _buckets(self) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
        """Yields pairs of parameter and fp32 tensor that are ready to be updated. All gradients are taken away first:
        the inner optimizer must see a bucket's alone."""
        waiting = deque(
            (p, w, g) for p, w in self._pairs() if (g := take_gradient(p, self.low_precision_of)) is not None
        )
        while waiting:
            bucket, size = [], 0
            while waiting and size < BUCKET_ELEMENTS:
                parameter, master, gradient = waiting.popleft()
                if master is not parameter:
                    master.data = parameter.detach().float()
                master.grad = gradient.to(master.dtype)
                if self.grad_factor is not None:
                    master.grad *= self.grad_factor.to(master.grad)
                bucket.append((parameter, master))
                size += parameter.numel()
            yield bucket

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            if isinstance(inner["lr"], Tensor):
                inner["lr"].fill_(own["lr"])
            else:
                inner["lr"] = own["lr"]
        for bucket in self._buckets():
            self.inner.step()  # passes over parameters without a gradient
            for parameter, master in bucket:
                master.grad = None
                if master is parameter:
                    self.low_precision_of[parameter].copy_(parameter)
                else:
                    parameter.copy_(master)
                    master.data = master.data.new_empty(0)
        self.grad_factor = None
        self._show_state()

    def load_state_dict(self, state_dict: Any) -> None:
        groups = self.inner.state_dict()["param_groups"]
        # torch makes state of the parameter's format; some optimizers look at its shape, too.
        for parameter, master in self._pairs():
            if master is not parameter:
                master.data = _stand_in(parameter).data
        self.inner.load_state_dict({"state": state_dict["state"], "param_groups": groups})
        self._empty()
        self._show_state()

    def _empty(self) -> None:
        for parameter, master in self._pairs():
            if master is not parameter:
                master.data = master.data.new_empty(0)

    def _show_state(self) -> None:
        for parameter, master in self._pairs():
            if master in self.inner.state:
                self.state[parameter] = self.inner.state[master]


def take_gradient(parameter: nn.Parameter, low_precision_of: LowPrecisionOf) -> Tensor | None:
    """Returns the gradient of a parameter, or None, and removes it there. That of a master weight is on its
    low-precision weight or, summed over micro-batches, on itself."""
    low = low_precision_of.get(parameter, parameter)
    gradient = parameter.grad if low.grad is None else low.grad
    parameter.grad = low.grad = None
    return gradient


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Returns an fp32 tensor of the parameter's shape, with memory for one element."""
    return nn.Parameter(torch.zeros((), dtype=torch.float32, device=parameter.device).expand(parameter.shape))
