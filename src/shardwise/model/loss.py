"""Cross-entropy as a sum over target tokens, in fp32 or better, without ever holding all logits of a large batch.

Owns IGNORE and the chunking rule: few logits are computed at once, many in chunks, which backward computes again.
Invariant: the sum is over targets that are not IGNORE; nothing is divided here, because only the training loop knows
how many targets the whole step has. Read next: `decoder.py`.

Shapes: N = batch * tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.spec.logits import MAX_LOGITS_BYTES

IGNORE = -100


def rows_at_once(num_logits: int) -> int:
    """Returns how many rows of `num_logits` logits are computed at once: as many as fit into MAX_LOGITS_BYTES in
    fp32."""
    return max(1, MAX_LOGITS_BYTES // (4 * num_logits))


TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""From logits (N, V) and targets (N,) to one loss per token (N,)."""


def cross_entropy_sum(
    head: Callable[[Tensor], Tensor], x_ND: Tensor, targets_N: Tensor, vocab: int, losses: TokenLosses | None = None
) -> Tensor:
    """Returns the sum of -log p(target) over targets that are not IGNORE, a scalar. `head` computes the logits (N, V)
    of rows (N, D); `losses` takes the place of -log p."""
    return sum_in_chunks(partial(_summed, head, losses or cross_entropy), x_ND, targets_N, vocab)


def sum_in_chunks(loss: Callable[[Tensor, Tensor], Tensor], x_ND: Tensor, targets_N: Tensor, num_logits: int) -> Tensor:
    """Returns the sum of a loss that makes `num_logits` logits per token, a scalar. Large batches go in chunks whose
    logits backward computes again (activation checkpointing)."""
    rows = rows_at_once(num_logits)
    if x_ND.shape[0] <= rows:
        return loss(x_ND, targets_N)
    losses = [
        checkpoint(loss, x, targets, use_reentrant=False, preserve_rng_state=False)
        for x, targets in zip(x_ND.split(rows), targets_N.split(rows), strict=True)
    ]
    return torch.stack(losses).sum()


def _summed(head: Callable[[Tensor], Tensor], losses: TokenLosses, x_ND: Tensor, targets_N: Tensor) -> Tensor:
    logits_NV = head(x_ND)
    if logits_NV.dtype != torch.float64:
        logits_NV = logits_NV.float()
    if losses is cross_entropy:
        return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="sum")
    found = losses(logits_NV, targets_N)
    assert found.shape == targets_N.shape, f"a loss of shape {tuple(found.shape)} for {tuple(targets_N.shape)} targets"
    return found.masked_fill(targets_N == IGNORE, 0).sum()


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Returns -log p(target) of each token (N,), 0 where the target is IGNORE."""
    return F.cross_entropy(logits_NV, targets_N, ignore_index=IGNORE, reduction="none")
