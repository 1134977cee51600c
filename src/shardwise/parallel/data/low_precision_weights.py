"""Mixed precision on one rank without FSDP2: low-precision weights beside fp32 master weights, which stay between
steps.

    parameter          what the model computes with, in 16 bits
    parameter.master   the weight itself, in fp32: `Shard.local`, what the optimizer updates and checkpoints hold

With one micro-batch per step a gradient is autograd's own, 16 bits wide, on the low-precision weight. With several,
each is added to `master.grad` in fp32 as soon as it is there and then dropped: the same sums that FSDP2 makes.
Invariant: a low-precision weight is its master, cast to 16 bits. Whoever writes a master writes it too: `Shard.put`,
and the update (optim/fused_adamw.py, optim/master_weights.py). What is frozen has no master.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwise.parallel.data.replicas import DataParallelWrapper


class LowPrecisionWeights(DataParallelWrapper):
    """The wrapper of a model that has master weights and low-precision weights, on one rank."""

    def __init__(self, model: nn.Module, dtype: torch.dtype):
        """Casts the weights of `model`, which are in fp32, to `dtype` one after the other, so that memory never holds
        more than the masters and their low-precision weights."""
        super().__init__(model)
        self._adds = False  # this step has several micro-batches
        self._is_hooked = False
        for parameter in self._trained():
            master = nn.Parameter(parameter.data)
            parameter.data = master.detach().to(dtype, copy=True)
            parameter.master = master  # type: ignore[attr-defined]

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def before_backward(self, kind: str, *, last: bool) -> None:
        self._adds = self._adds or not last
        if self._adds and not self._is_hooked:
            self._is_hooked = True
            for parameter in self._trained():
                parameter.register_post_accumulate_grad_hook(self._add)

    def _add(self, parameter: Any) -> None:
        if not self._adds:
            return
        master = parameter.master
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad += parameter.grad
        parameter.grad = None

    def finish(self) -> None:
        self._adds = False
