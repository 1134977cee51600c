"""Replicas add their gradients up, never average them; micro-batches before the last stay local."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.parallel.data.replicas import Replicated, SummedAtEnd
from shardwise.parallel.traffic import Traffic


class Two(nn.Module):
    """One parameter is used, one is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.frozen * x).sum()


def learn(kind: str) -> dict[str, Any]:
    """Two micro-batches; rank r multiplies by r + 1, and by ten in the second."""
    model, traffic = Two(), Traffic()
    sums: SummedAtEnd
    if kind == "replicated":
        sums = Replicated(model, dist.group.WORLD, 2**20, traffic)
    else:
        sums = SummedAtEnd(model, [(dist.group.WORLD, list(model.parameters()))], 2**20, traffic)
    before = []
    for micro in range(2):
        last = micro == 1
        sums.before_forward(last=last)
        loss = sums.forward(torch.full((4,), (dist.get_rank() + 1.0) * 10**micro))
        sums.before_backward("B", last=last)
        loss.backward()
        sums.after_backward("B", last=last)
        assert model.weight.grad is not None
        before.append((float(model.weight.grad[0]), traffic.reductions))
    sums.finish()
    return {"before": before, "after": model.weight.grad.tolist(), "traffic": (traffic.reductions, traffic.num_bytes)}


def test_torch_ddp_with_a_summing_hook(ranks: Any) -> None:
    for rank, found in enumerate(ranks.run(learn, 3, "replicated")):
        assert found["before"][0] == (rank + 1, 0)
        assert found["after"] == [66.0] * 4  # (1 + 2 + 3) * (1 + 10)
        assert found["traffic"] == (1, 16)


def test_one_sum_at_the_end_of_a_pipeline(ranks: Any) -> None:
    for rank, found in enumerate(ranks.run(learn, 3, "at end")):
        assert found["before"] == [(rank + 1, 0), (11 * (rank + 1), 0)]
        assert found["after"] == [66.0] * 4
        assert found["traffic"] == (1, 16)
