"""Loss on held-out text: the same for any number of ranks, because only token sums meet."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.progress import track
from torch import nn

from shardwise.data.loader import to_tensors

if TYPE_CHECKING:
    from shardwise.data.corpus import Sequences


@torch.inference_mode()
def evaluate(
    model: nn.Module,
    sequences: Sequences,
    *,
    global_batch: int,
    rows: range,
    micro_batch: int,
    device: torch.device,
    max_batches: int | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> float | None:
    """Mean cross-entropy in nats over at most `max_batches` global batches; None if there is nothing held out."""
    num_batches = sequences.num_sequences // global_batch
    if max_batches is not None:
        num_batches = min(num_batches, max_batches)
    if num_batches == 0 and sequences.num_sequences:  # fewer sequences than one batch: some rows come twice
        num_batches = 1
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    for step in track(range(1, num_batches + 1), "evaluating", disable=not progress, transient=True):
        for first in range(rows.start, rows.stop, micro_batch):
            part = range(first, min(first + micro_batch, rows.stop))
            batch = to_tensors(sequences.batch(step, part, global_batch)).to(device)
            losses = model(batch.tokens, batch.targets, documents_BT=batch.documents)
            sums += torch.stack([losses.cross_entropy.double(), (batch.targets >= 0).sum().double()])
    model.train(was_training)
    if distributed:
        dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count if count else None


def perplexity(loss: float) -> float:
    return math.exp(min(loss, 700.0))
