"""Computes the loss on held-out text: the same for any layout, because only sums over tokens are added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.progress import track

from shardwise.data.loader import TensorBatch, cut_microbatches, to_tensors
from shardwise.model.decoder import Decoder

if TYPE_CHECKING:
    from shardwise.data.corpus import Sequences

LossSums = Callable[[Sequence[TensorBatch]], torch.Tensor]
"""Summed losses of some micro-batches, cross-entropy first: an engine's `evaluate`, or `plain_sums` of a model."""


def plain_sums(model: Decoder) -> LossSums:
    """Returns a function that gives a model's summed losses of some micro-batches, in nats."""

    def sums(microbatches: Sequence[TensorBatch]) -> torch.Tensor:
        losses = [model(micro.tokens, micro.targets, documents_BT=micro.documents) for micro in microbatches]
        return torch.stack([torch.stack([part.double() for part in parts]) for parts in losses]).sum(0)

    return sums


@torch.no_grad()
def evaluate(
    loss_sums: LossSums,
    sequences: Sequences,
    *,
    global_batch: int,
    rows: range,
    micro_batch: int,
    device: torch.device,
    num_microbatches: int = 0,
    same_shape: bool = False,
    counts_targets: bool = True,
    max_batches: int | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> float | None:
    """Returns the mean cross-entropy in nats over at most `max_batches` global batches; None if nothing is held out.

    counts_targets   whether this rank adds its targets: one of the ranks that work on the same rows does
    """
    num_batches = num_held_out(sequences, global_batch, max_batches)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for step in track(range(1, num_batches + 1), "evaluating", disable=not progress, transient=True):
        batch = sequences.batch(step, rows, global_batch)
        micro = cut_microbatches(to_tensors(batch), micro_batch, num_microbatches, same_shape)
        sums[0] += loss_sums([part.to(device) for part in micro])[0]
        sums[1] += batch.num_targets if counts_targets else 0
    if distributed:
        dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count if count else None


def num_held_out(sequences: Sequences, global_batch: int, max_batches: int | None) -> int:
    """Returns how many global batches an evaluation takes."""
    num_batches = sequences.num_sequences // global_batch
    if max_batches is not None:
        num_batches = min(num_batches, max_batches)
    return max(num_batches, min(1, sequences.num_sequences))  # fewer sequences than one batch: some rows come twice


def perplexity(loss: float) -> float:
    """Returns exp(loss) of a mean cross-entropy in nats, without overflow."""
    return math.exp(min(loss, 700.0))
