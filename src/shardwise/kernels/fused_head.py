"""This is a head whose loss leaves its gradients behind, whose matmuls may be other kernels, and whose weight may be
quantized.

`FusedHead` takes the place of the plain head (model/decoder.py). Where a batch has too many logits to hold them at
once, the plain head computes them again in backward; this one computes each chunk's gradients while its logits are
there (`fused_loss.py`). Fewer logits than that are computed as the plain head does, to the last bit.

Shapes: B batch, T tokens, N = B*T, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from shardwise.kernels.fused_loss import CombineRanks, FusedLossSettings, HeadMatmuls, fused_cross_entropy
from shardwise.kernels.quantized_weight import QuantizedWeight, weight_of
from shardwise.model import loss
from shardwise.model.decoder import Decoder, Head
from shardwise.model.replacement import become
from shardwise.spec.logits import CUDA_TIMES


def apply_fused_head(model: Decoder, *, fused: bool = True, compiled: bool = False) -> None:
    """Makes the head a `FusedHead`, in place, on whatever part of a model has one. With `fused` gradients are computed
    in forward, else logits are computed again in backward. With `compiled`, on a GPU one kernel computes losses and
    gradients of logits."""
    if model.head is not None:
        become(model.head, FusedHead, fused=fused, compiled=compiled)


class FusedHead(Head):
    """A head that computes its loss, and where it is fused its gradients, chunk by chunk."""

    fused: bool = True
    compiled: bool = False
    matmuls: HeadMatmuls = HeadMatmuls()  # the three matmuls of a fused loss
    matmul: Callable[..., Tensor] = staticmethod(F.linear)  # the matmul of logits otherwise

    def forward(self, x_BTD: Tensor, targets_BT: Tensor | None = None, tied: Tensor | None = None) -> Tensor:
        weight = weight_of(self) if tied is None else tied
        if targets_BT is None:
            return self.logits(x_BTD, weight)
        x_ND, targets_N = x_BTD.flatten(0, 1), targets_BT.flatten()
        if not self.fused or self.losses or x_ND.shape[0] <= loss.rows_at_once(self.vocab):
            logits_of = partial(self.logits, weight=weight)
            return loss.cross_entropy_sum(logits_of, x_ND, targets_N, self.vocab, self.losses)
        is_target_N = targets_N != loss.IGNORE
        rows_N = targets_N.masked_fill(~is_target_N, 0)
        return self.fused_loss(x_ND, weight, rows_N, is_target_N, is_target_N, self.vocab)

    def fused_loss(
        self,
        x_ND: Tensor,
        weight: Tensor | QuantizedWeight,
        rows_N: Tensor,
        is_target_N: Tensor,
        is_here_N: Tensor,
        num_logits: int,
        combine: CombineRanks | None = None,
    ) -> Tensor:
        """Returns the sum of -log p(target), in nats; its arguments are as `fused_cross_entropy` has them."""
        rows, block = fused_rows(x_ND, num_logits), loss.rows_at_once(num_logits)
        compiled = self.compiled and x_ND.is_cuda
        settings = FusedLossSettings(rows, block, self.softcap or 0.0, self.matmuls, compiled, combine)
        return fused_cross_entropy(x_ND, weight, rows_N, is_target_N, is_here_N, settings)

    def logits(self, x: Tensor, weight: Tensor | QuantizedWeight) -> Tensor:
        return self.cap(self.matmul(x, weight))


def fused_rows(x_ND: Tensor, num_logits: int) -> int:
    """Returns how many rows a chunk has whose logits exist once. Chunks are as even as can be: one shape for compiled
    kernels."""
    most = loss.rows_at_once(num_logits)
    if x_ND.is_cuda:
        most = max(1, CUDA_TIMES * loss.MAX_LOGITS_BYTES // (x_ND.element_size() * num_logits))
    num_chunks = -(-x_ND.shape[0] // most)
    return -(-x_ND.shape[0] // num_chunks)
