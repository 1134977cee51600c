"""Computes the loss on held-out text: the same for any layout, because only sums over tokens are added up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from rich.progress import track

from shardwise.data.loader import TensorBatch, cut_microbatches, to_tensors
from shardwise.data.own_rows import batch_of
from shardwise.data.sequences import IGNORE
from shardwise.model.decoder import Decoder
from shardwise.parallel.engine import Engine
from shardwise.terminal import make_console

if TYPE_CHECKING:
    from shardwise.data.corpus import Sequences
    from shardwise.data.sequences import Batch

EVAL_BATCH = 8  # what `shardwise eval` computes at once
EVAL_ROWS = 16  # sequences for each of train.eval_batches, whatever the training batch is
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
    max_rows: int | None = None,
    distributed: bool = False,
    progress: bool = False,
) -> float | None:
    """Returns the mean cross-entropy in nats over the first `max_rows` held-out sequences, which are the same for any
    global batch; None if nothing is held out.

    counts_targets   whether this rank adds its targets: one of the ranks that work on the same rows does
    """
    num_rows = num_held_out(sequences, max_rows)
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    numbers = range(-(-num_rows // global_batch))
    for number in track(numbers, "evaluating", disable=not progress, transient=True, console=make_console()):
        batch = held_out_batch(sequences, number, rows, global_batch, num_rows)
        micro = cut_microbatches(to_tensors(batch), micro_batch, num_microbatches, same_shape)
        sums[0] += loss_sums([part.to(device) for part in micro])[0]
        sums[1] += batch.num_targets if counts_targets else 0
    if distributed:
        dist.all_reduce(sums)
    total, count = sums.tolist()
    return total / count if count else None


@torch.no_grad()
def score(engine: Engine, rows: Sequence[Sequence[int]]) -> list[float]:
    """Collective. Returns the mean loss, in nats per token, of each row of token ids: at most seq_len + 1 of them. All
    ranks ask for the same rows; data-parallel ranks compute all of them."""
    plan, losses = engine.plan, []
    for row in rows:
        batch = batch_of([row], plan.seq_len, engine.spec.vocab, 0)
        micro = cut_microbatches(to_tensors(batch), plan.micro_batch, plan.num_microbatches, plan.pp > 1)
        total = engine.evaluate([part.to(engine.mesh.device) for part in micro])[0].double().reshape(1)
        if plan.world > 1:
            dist.all_reduce(total)
        losses.append(float(total) / plan.dp / max(1, batch.num_targets))
    return losses


def num_held_out(sequences: Sequences, max_rows: int | None) -> int:
    """Returns how many sequences an evaluation takes: the first `max_rows` of those that are held out (None: all), in
    whole batches of EVAL_BATCH where there is one. It does not depend on how training is batched."""
    found = sequences.num_sequences if max_rows is None else min(sequences.num_sequences, max_rows)
    return found - found % EVAL_BATCH if found > EVAL_BATCH else found


def held_out_batch(sequences: Sequences, number: int, rows: range, global_batch: int, num_rows: int) -> Batch:
    """Returns rows of a global batch (the first is 0) of the first `num_rows` held-out sequences. Rows beyond them have
    no targets: they only fill the batch."""
    batch = sequences.batch(number + 1, rows, global_batch)
    batch.targets[max(0, num_rows - number * global_batch - rows.start) :] = IGNORE
    return batch


def perplexity(loss: float) -> float:
    """Returns exp(loss) of a mean cross-entropy in nats, without overflow."""
    return math.exp(min(loss, 700.0))
