"""Vocabulary parallelism, the vocabulary split over tensor-parallel ranks: embedding, head and cross-entropy, each rank
with its own rows.

Invariant: during training with cross-entropy no rank ever holds a token's logits for the whole vocabulary; three
values per token (largest logit, sum of exponentials, the target's logit) are reduced instead; of a fused loss two, the
first ones as one. A loss of the user's has all logits. Ids outside the vocabulary fail as they do on one device. Read
next: collectives.py, and model/loss.py for what is computed.

    split    rows of embedding and head
    held     V rows of each, and logits for V entries of the vocabulary
    sent     the values above, per token; embedding's output as at the end of any region

Shapes: B batch, T tokens, N = B*T, D model width, V this rank's rows of the vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.kernels.fused_head import FusedHead
from shardwise.kernels.quantized_weight import QuantizedWeight, weight_of
from shardwise.model.loss import IGNORE, cross_entropy_sum, rows_at_once, sum_in_chunks
from shardwise.parallel.tensor.collectives import TensorParallel, all_gather, all_reduce, enter, leave, share
from shardwise.spec.model import ModelSpec


class VocabEmbedding(nn.Embedding):
    """The whole embedding of tokens, though each rank looks up only those whose rows it has."""

    def __init__(self, spec: ModelSpec, weight: Tensor, tp: TensorParallel):
        super().__init__(weight.shape[0], weight.shape[1], device="meta")
        self.weight, self.vocab, self.tp = weight, spec.vocab, tp

    def forward(self, tokens_BT: Tensor) -> Tensor:
        rows_BT, is_elsewhere_BT = find_rows(tokens_BT, self.vocab, self.tp)
        x_BTD = F.embedding(rows_BT, self.weight).masked_fill(is_elsewhere_BT[..., None], 0)
        return leave(x_BTD, self.tp)


class VocabHead(FusedHead):
    """Scores for this rank's rows of the vocabulary; only evaluation and generation bring them together."""

    def __init__(self, spec: ModelSpec, weight: nn.Parameter | None, tp: TensorParallel):
        with torch.device("meta"):
            super().__init__(spec)
        self.weight, self.tp = weight, tp

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        weight = weight_of(self) if tied is None else tied
        x_BTD = enter(x_BTD, self.tp)
        if targets_BT is None:
            return self._whole_logits(weight, x_BTD)
        x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
        if self.losses:
            return cross_entropy_sum(partial(self._whole_logits, weight), x_ND, targets_N, self.vocab, self.losses)
        most_rows = -(-self.vocab // self.tp.size)  # not this rank's own count: all ranks must make the same chunks
        if not self.fused or x_ND.shape[0] <= rows_at_once(most_rows):
            return sum_in_chunks(partial(self._loss, weight), x_ND, targets_N, most_rows)
        is_target_N = targets_N != IGNORE
        rows_N, is_elsewhere_N = find_rows(targets_N.masked_fill(~is_target_N, 0), self.vocab, self.tp)
        is_here_N = is_target_N & ~is_elsewhere_N
        return self.fused_loss(x_ND, weight, rows_N, is_target_N, is_here_N, most_rows, self._combine)

    def _whole_logits(self, weight: Tensor | QuantizedWeight, x: Tensor) -> Tensor:
        """Collective. Returns the scores (..., V) for the whole vocabulary, on every rank."""
        return _GatherLogits.apply(self.logits(x, weight), self.vocab, self.tp)

    def _combine(self, sums_N: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the log-sum-exp over the whole vocabulary and the target's logit, which one rank has, both of shape
        (N,), by one all-gather."""
        all_P2N = all_gather(torch.stack((sums_N, target_N)), self.tp.group, self.tp.wait)
        return torch.logsumexp(all_P2N[:, 0], 0), all_P2N[:, 1].sum(0)

    def _loss(self, weight: Tensor | QuantizedWeight, x_ND: Tensor, targets_N: Tensor) -> Tensor:
        return _CrossEntropy.apply(self.logits(x_ND, weight), targets_N, self.vocab, self.tp)


def find_rows(ids: Tensor, vocab: int, tp: TensorParallel) -> tuple[Tensor, Tensor]:
    """Returns ids as rows of this rank's slice, and which of them other ranks have (row 0 stands in for those)."""
    start, stop = share(vocab, tp.size, tp.index)
    # Ids outside the vocabulary are nobody's: they stay out of range, so that the look-up fails.
    is_elsewhere = ((ids >= 0) & (ids < start)) | ((ids >= stop) & (ids < vocab))
    return (ids - start).masked_fill(is_elsewhere, 0), is_elsewhere


class _CrossEntropy(torch.autograd.Function):
    """Computes the sum of -log p(target) over all ranks' logits, in at least fp32. Backward needs no communication."""

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, vocab: int, tp: TensorParallel) -> Tensor:
        work = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        is_target_N = targets_N != IGNORE
        rows_N, is_elsewhere_N = find_rows(targets_N.masked_fill(~is_target_N, 0), vocab, tp)
        # 1. The largest logit of each token, so that no exponential overflows.
        largest_N = all_reduce(logits_NV.amax(-1).to(work), tp.group, dist.ReduceOp.MAX, tp.wait)
        # 2. Sum of exponentials and the target's logit, which one rank has, in one all-reduce.
        exp_NV = (logits_NV - largest_N[:, None]).exp_()  # 16-bit logits become fp32 here, without a copy of their own
        own_N = logits_NV.gather(1, rows_N[:, None])[:, 0].to(work).masked_fill(is_elsewhere_N, 0)
        sum_N, target_N = all_reduce(torch.stack((exp_NV.sum(-1), own_N)), tp.group, wait=tp.wait)
        loss_N = sum_N.log() + (largest_N - target_N)
        # 3. For backward: d loss / d logits = probabilities, less one at the target.
        ctx.save_for_backward(exp_NV.div_(sum_N[:, None]), rows_N, is_target_N, is_target_N & ~is_elsewhere_N)
        ctx.dtype = logits_NV.dtype
        return loss_N.masked_fill(~is_target_N, 0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities_NV, rows_N, is_target_N, is_mine_N = ctx.saved_tensors
        grad_NV = probabilities_NV * (grad * is_target_N)[:, None]
        grad_NV.scatter_add_(1, rows_N[:, None], -(grad * is_mine_N)[:, None])
        return grad_NV.to(ctx.dtype), None, None, None


class _GatherLogits(torch.autograd.Function):
    """Gathers logits for the whole vocabulary. Every rank then computes the same from them, so backward takes its own
    rows."""

    @staticmethod
    def forward(ctx: Any, logits_BTV: Tensor, vocab: int, tp: TensorParallel) -> Tensor:
        bounds = [share(vocab, tp.size, index) for index in range(tp.size)]
        ctx.start, ctx.stop = bounds[tp.index]
        widest = bounds[0][1]  # ranks with one row less pad
        parts = all_gather(F.pad(logits_BTV, (0, widest - logits_BTV.shape[-1])), tp.group, tp.wait)
        return torch.cat([part[..., : stop - start] for part, (start, stop) in zip(parts, bounds, strict=True)], dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad[..., ctx.start : ctx.stop], None, None
