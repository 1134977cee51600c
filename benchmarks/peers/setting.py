"""What all variants share: model, first weights, data, optimizer. A variant may differ only in how it spreads the work.

Invariant: `Setting` plus a rank and a round fully decide the numbers, so that every variant must show the same losses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

HEAD = 32

Batch = tuple[Tensor, Tensor]  # tokens_BT, targets_BT


class Done(NamedTuple):
    """What a step hands back. The loss is this rank's mean, or already the mean over ranks; both average to the
    same."""

    loss: float
    norm: Tensor  # of the whole gradient before clipping; a DTensor where that is what the library returns


Step = Callable[[list[Batch]], Done]  # one optimizer step over this rank's micro-batches


@dataclass(frozen=True)
class Setting:
    ranks: int
    rows: int  # sequences per rank and micro-batch
    seq_len: int
    micro_batches: int
    hidden: int
    layers: int
    seed: int = 0
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0

    blocks = "layers"  # where the model has its list of blocks, and their class
    block_class = "Block"

    @property
    def vocab(self) -> int:
        return self.spec.vocab

    @property
    def spec(self) -> ModelSpec:
        """The `tiny` preset, stretched to `hidden` and `layers`; at 256 and 6 it is `tiny` itself."""
        heads = self.hidden // HEAD
        return replace(
            preset("tiny"),
            num_layers=self.layers,
            hidden=self.hidden,
            num_heads=heads,
            num_kv_heads=heads // 2,
            head_dim=HEAD,
            ffn=self.hidden * 11 // 4,
        )

    def new_model(self) -> nn.Module:
        model = Decoder(self.spec)
        initialize(model, self.seed)
        return model

    def new_optimizer(self, model: Any) -> torch.optim.AdamW:
        """Weight decay on matrices only, as careful people do. `model` has `parameters()`; if they are shards, those
        keep their ndim."""
        parameters = list(model.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self.lr, betas=self.betas, eps=self.eps, fused=True)

    def batch(self, number: int, rank: int) -> list[Batch]:
        """The micro-batches of one rank in one round. Fresh random tokens: nothing to memorise, so losses stay
        ordinary."""
        generator = torch.Generator().manual_seed((self.seed * 1_000_003 + number) * 1_000 + rank)
        shape = (self.micro_batches, self.rows, self.seq_len + 1)
        tokens_MBT = torch.randint(0, self.vocab, shape, generator=generator)
        return [(t_BT[:, :-1].contiguous(), t_BT[:, 1:].contiguous()) for t_BT in tokens_MBT]


def mean_loss(model: Callable[..., object], batch: Batch, micro_batches: int) -> Tensor:
    """Mean over the tokens of one micro-batch, divided for accumulation. Ranks hold equally many tokens."""
    tokens_BT, targets_BT = batch
    losses = model(tokens_BT, targets_BT)
    return losses.cross_entropy / (targets_BT.numel() * micro_batches)  # type: ignore[attr-defined]


def reference(setting: Setting, steps: int) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step in one process that holds the whole batch: what every variant must
    reproduce."""
    model = setting.new_model()
    optimizer = setting.new_optimizer(model)
    results = []
    for number in range(steps):
        whole = [micro for rank in range(setting.ranks) for micro in setting.batch(number, rank)]
        total = 0.0
        for micro in whole:
            loss = mean_loss(model, micro, len(whole))
            loss.backward()
            total += loss.item()
        norm = nn.utils.clip_grad_norm_(model.parameters(), setting.clip)
        optimizer.step()
        optimizer.zero_grad()
        results.append((total, norm.item()))
    return results
