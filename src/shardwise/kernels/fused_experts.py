"""Fuses the gate and up projections of experts into one grouped matmul, over weights that lie together in memory.

Only for whoever keeps the weights that are computed with (parallel/data/low_precision_weights.py): putting them
together anew in every pass would copy more than it saves. Read next: model/experts.py.

Shapes: M rows, D model width, F expert width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise.kernels.gated import gated
from shardwise.model.experts import Experts
from shardwise.model.replacement import become


@torch.no_grad()
def fuse_experts(experts: Experts) -> None:
    """Moves gate and up into one piece of memory, in place; both are views of it from then on."""
    if experts.gate is None:
        return
    gate_up_E2FD = torch.cat([experts.gate, experts.up], 1)
    experts.gate.data, experts.up.data = gate_up_E2FD.chunk(2, dim=1)
    become(experts, FusedExperts, gate_up_E2FD=gate_up_E2FD)


class FusedExperts(Experts):
    """Experts whose gate and up projections are one grouped matmul."""

    gate_up_E2FD: Tensor

    def grouped_hidden(self, x_MD: Tensor, ends_E: Tensor) -> Tensor:
        return gated(_GateAndUp.apply(x_MD, self.gate, self.up, self.gate_up_E2FD, ends_E), self.activation)


class _GateAndUp(torch.autograd.Function):
    """Computes both matmuls of gated experts as one. Their weights' gradients are two matmuls, because the result of
    one would have to be cut apart, which is a copy; the input's is one, and nothing has to be added."""

    @staticmethod
    def forward(ctx: Any, x_MD: Tensor, gate: Tensor, up: Tensor, gate_up_E2FD: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_MD, gate_up_E2FD, ends_E)
        return F.grouped_mm(x_MD, gate_up_E2FD.transpose(1, 2), offs=ends_E)

    @staticmethod
    def backward(ctx: Any, grad_M2F: Tensor) -> tuple[Tensor | None, ...]:
        x_MD, gate_up_E2FD, ends_E = ctx.saved_tensors
        grad_x_MD = F.grouped_mm(grad_M2F, gate_up_E2FD, offs=ends_E) if ctx.needs_input_grad[0] else None
        halves = zip(grad_M2F.chunk(2, dim=1), ctx.needs_input_grad[1:3], strict=True)
        weights = [F.grouped_mm(half_MF.t(), x_MD, offs=ends_E) if needed else None for half_MF, needed in halves]
        return grad_x_MD, *weights, None, None
