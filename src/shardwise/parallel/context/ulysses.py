"""Ulysses: for the time of attention, ranks exchange tokens for heads. arXiv 2309.14509.

Each rank comes with a stretch of the tokens and all heads; an all-to-all gives it all tokens of some heads, ordinary
attention runs with the ordinary mask of the whole row, and a second all-to-all takes the result back. Invariant:
heads stay whole; key-value heads are repeated only as far as every rank needs one. Read next: sequence_split.py.

    split    tokens before and after attention, heads within
    held     activations of T / P tokens, and within attention those of all tokens for H / P heads
    sent     an all-to-all of q, k and v before attention and one of its output after, both again in backward

Shapes: B batch, T tokens of the row, t = T / P of this rank, H heads, K key-value heads, C channels of a head, P ranks.
"""

from __future__ import annotations

from math import lcm
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.attention_kernels import AttentionKernel, attend
from shardwise.model.masking import Mask
from shardwise.parallel.traffic import Wait, unseen


def ulysses_attention(
    group: dist.ProcessGroup,
    q_BtHC: Tensor,
    k_BtKC: Tensor,
    v_BtKC: Tensor,
    mask: Mask,
    kernel: AttentionKernel,
    scale: float,
    cap: float,
    wait: Wait = unseen,
) -> Tensor:
    """Computes `model.attention_kernels.attend` for the tokens of one rank: same arguments, same result (B, t, H, C).
    The mask is that of the whole row."""
    size = group.size()
    repeats = lcm(k_BtKC.shape[2], size) // k_BtKC.shape[2]
    if repeats > 1:
        k_BtKC, v_BtKC = k_BtKC.repeat_interleave(repeats, dim=2), v_BtKC.repeat_interleave(repeats, dim=2)
    parts = [x.unflatten(2, (size, -1)) for x in (q_BtHC, k_BtKC, v_BtKC)]
    # One all-to-all: to each rank its heads of q, k and v side by side.
    away_BtPX = torch.cat([part.flatten(3) for part in parts], dim=-1)
    home_BTX = _TokensForHeads.apply(away_BtPX, group, wait)
    widths = [part.shape[3] * part.shape[4] for part in parts]
    q, k, v = (x.unflatten(2, part.shape[3:]) for x, part in zip(home_BTX.split(widths, dim=-1), parts, strict=True))
    out_BThC = attend(q, k, v, mask, kernel, scale, cap)
    out_BtPX = _HeadsForTokens.apply(out_BThC.flatten(2), group, wait)
    return out_BtPX.flatten(2).unflatten(2, (-1, out_BThC.shape[-1]))


# Each is the other's backward ----------------------------------------------------------------------------------------


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtPX: Tensor, group: dist.ProcessGroup, wait: Wait) -> Tensor:
        ctx.line = group, wait
        return tokens_for_heads(x_BtPX, group, wait)

    @staticmethod
    def backward(ctx: Any, grad_BTX: Tensor) -> tuple[Tensor, None, None]:
        return heads_for_tokens(grad_BTX, *ctx.line), None, None


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTX: Tensor, group: dist.ProcessGroup, wait: Wait) -> Tensor:
        ctx.line = group, wait
        return heads_for_tokens(x_BTX, group, wait)

    @staticmethod
    def backward(ctx: Any, grad_BtPX: Tensor) -> tuple[Tensor, None, None]:
        return tokens_for_heads(grad_BtPX, *ctx.line), None, None


def tokens_for_heads(x_BtPX: Tensor, group: dist.ProcessGroup, wait: Wait) -> Tensor:
    """Collective. Exchanges this rank's tokens of all heads, grouped by rank (B, t, P, X), for all tokens of its heads
    (B, T, X) and returns these."""
    return _exchange(x_BtPX.permute(2, 0, 1, 3), group, wait).movedim(0, 1).flatten(1, 2)


def heads_for_tokens(x_BTX: Tensor, group: dist.ProcessGroup, wait: Wait) -> Tensor:
    """Collective. Exchanges all tokens of this rank's heads (B, T, X) for its tokens of all heads, grouped by rank
    (B, t, P, X), and returns these."""
    return _exchange(x_BTX.unflatten(1, (group.size(), -1)).movedim(1, 0), group, wait).permute(1, 2, 0, 3)


def _exchange(x_P: Tensor, group: dist.ProcessGroup, wait: Wait) -> Tensor:
    x_P = x_P.contiguous()
    out_P = torch.empty_like(x_P)
    with wait("all-to-all", out_P.nbytes):
        dist.all_to_all_single(out_P, x_P, group=group)
    return out_P
