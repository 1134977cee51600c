"""Optimizers over fp16 weights that compute, and keep their state, in fp32.

torch's optimizers keep state in the format of the parameter. In fp16 the second moment of any gradient below 2e-4 is zero, so Adam
divides by its epsilon, and unscaled gradients vanish before they are used. Here the inner optimizer has stand-ins for the
parameters: fp32 copies that exist while they are updated, a few at a time. Invariant: between steps a stand-in is empty, and
`state[parameter]` is the inner optimizer's own entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

Groups = list[dict[str, Any]]
BUCKET_NUMBERS = 2**24  # of parameters that are copied at a time: 64 MiB of weights and 64 of gradients


class WideState(torch.optim.Optimizer):
    grad_factor: Tensor | None = None  # of the next step: gradients are multiplied by it in fp32

    def __init__(self, groups: Groups, build: Callable[[Groups], torch.optim.Optimizer]):
        """`build`: the inner optimizer of groups of parameters."""
        inner = [{**group, "params": [_stand_in(p) for p in group["params"]]} for group in groups]
        self.inner = build(inner)
        super().__init__(groups, dict(self.inner.defaults))
        self._empty()
        self._show_state()  # Adagrad's is there from the start

    def _pairs(self) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            yield from zip(own["params"], inner["params"], strict=True)

    def _buckets(self) -> Iterator[list[tuple[nn.Parameter, nn.Parameter]]]:
        bucket: list[tuple[nn.Parameter, nn.Parameter]] = []
        for pair in self._pairs():
            if pair[0].grad is None:
                continue
            bucket.append(pair)
            if sum(parameter.numel() for parameter, _ in bucket) >= BUCKET_NUMBERS:
                yield bucket
                bucket = []
        if bucket:
            yield bucket

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for own, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            if isinstance(inner["lr"], Tensor):
                inner["lr"].fill_(own["lr"])
            else:
                inner["lr"] = own["lr"]
        for bucket in self._buckets():
            for parameter, wide in bucket:
                assert parameter.grad is not None
                wide.data = parameter.detach().float()
                gradient = parameter.grad.float()
                wide.grad = gradient if self.grad_factor is None else gradient * self.grad_factor.to(gradient)
            self.inner.step()  # passes over stand-ins without a gradient
            for parameter, wide in bucket:
                parameter.copy_(wide)
                wide.grad, wide.data = None, wide.data.new_empty(0)
        self.grad_factor = None
        self._show_state()

    def load_state_dict(self, state_dict: Any) -> None:
        groups = self.inner.state_dict()["param_groups"]
        # torch makes state of the parameter's format; some optimizers look at its shape, too.
        for parameter, wide in self._pairs():
            wide.data = _stand_in(parameter).data
        self.inner.load_state_dict({"state": state_dict["state"], "param_groups": groups})
        self._empty()
        self._show_state()

    def _empty(self) -> None:
        for _, wide in self._pairs():
            wide.data = wide.data.new_empty(0)

    def _show_state(self) -> None:
        for parameter, wide in self._pairs():
            if wide in self.inner.state:
                self.state[parameter] = self.inner.state[wide]


def _stand_in(parameter: nn.Parameter) -> nn.Parameter:
    """Of the parameter's shape, with memory for one number."""
    return nn.Parameter(torch.zeros((), dtype=torch.float32, device=parameter.device).expand(parameter.shape))
