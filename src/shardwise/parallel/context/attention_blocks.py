"""Attention of some queries to some of the keys, so that parts can be put together: the blocks that a ring is made of.

Owns the kernels that return their log-sum-exp (LSE), their backward, and merging. Invariants: merging all blocks of a
query gives softmax over all its keys, to rounding; a query that sees nothing in a block has LSE -inf there, so that
the block weighs nothing. Backward of a block needs the merged output and LSE, nothing of other blocks.
FlashAttention, arXiv 2205.14135, section 3.1 and appendix B. No communication here. Read next: ring.py.

Shapes: B batch, H heads, K key-value heads, T queries, S keys, C channels of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

aten: Any = torch.ops.aten
HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sight:
    """Which keys the queries of a block see: all, those that are not ahead of them, or those in `allowed_1TS`."""

    causal: bool = False
    allowed_1TS: Tensor | None = None  # (1 or B, 1, T, S)


@dataclass(frozen=True)
class Score:
    """How the model scores keys, and whether by its definition or by a fused kernel."""

    scale: float
    softcap: float = 0.0
    math: bool = False


Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


def work_dtype(x: Tensor) -> torch.dtype:
    """Returns the dtype in which blocks are merged: fp32, or fp64 for fp64."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def attend_block(q: Tensor, k: Tensor, v: Tensor, sight: Sight, score: Score) -> tuple[Tensor, Tensor]:
    """Returns the output (B, H, T, C) and the LSE (B, H, T) of the queries over this block's keys."""
    kernel = choose_kernel(q, k, v, sight, score)
    if kernel == "math":
        return _math(q, k, v, sight, score)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, sight.causal, scale=score.scale)[:2]
    if kernel == "cudnn":
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, sight.causal, scale=score.scale
        )
        return out, lse.view(q.shape[:3])
    bias = _bias(q, k, sight)
    if kernel == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, sight.causal, attn_mask=bias, scale=score.scale
        )
    else:
        k, v = _repeated(k, q), _repeated(v, q)
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, sight.causal, scale=score.scale
        )
        lse = lse[..., : q.shape[2]]
    if sight.allowed_1TS is not None:
        # Both kernels answer LSE 0 for a query that sees nothing, which would weigh like a real key.
        lse = lse.masked_fill(~sight.allowed_1TS.any(-1), float("-inf"))
    return out, lse


def attend_block_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight, score: Score
) -> Gradients:
    """Returns the gradients of q, k and v that one block contributes. `out` and `lse` are the merged ones: then
    exp(score - lse) is each key's true share, and the gradients of blocks add up."""
    kernel = choose_kernel(q, k, v, sight, score)
    if kernel == "math":
        return _math_backward(grad, q, k, v, out, lse, sight, score)
    if kernel == "flash":
        # Without dropout the random state is not read; no cumulative lengths: all rows have the same.
        seed = torch.empty(2, dtype=torch.uint64, device=q.device)
        return aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, sight.causal, seed, seed,
            scale=score.scale,
        )  # fmt: skip
    if kernel == "cudnn":
        seed = torch.zeros((), dtype=torch.int64, device=q.device)
        return aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse.contiguous().unsqueeze(-1), seed, seed, None, None, None, q.shape[2], k.shape[2],
            0.0, sight.causal, scale=score.scale,
        )  # fmt: skip
    bias = _bias(q, k, sight)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, sight.causal, attn_mask=bias, scale=score.scale
        )
    seed = torch.zeros((), dtype=torch.int64, device=q.device)
    lse = F.pad(lse, (0, -lse.shape[2] % 32), value=float("inf"))  # the kernel reads 32 at a time
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, _repeated(k, q), _repeated(v, q), bias, out, lse, seed, seed, 0.0, [True, True, True, False],
        sight.causal, scale=score.scale,
    )  # fmt: skip
    return dq, _summed(dk, k), _summed(dv, v)


def merge(out: Tensor, lse: Tensor, more_out: Tensor, more_lse: Tensor) -> None:
    """Merges a block into the output and LSE that these queries have so far, in place. They must have seen a key: the
    block of their own token comes first."""
    both = torch.logaddexp(lse, more_lse)
    out.lerp_(more_out.to(out.dtype), (more_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)


def choose_kernel(q: Tensor, k: Tensor, v: Tensor, sight: Sight, score: Score) -> str:
    """Returns the kernel of a block: math | cpu | cudnn | flash | efficient. Fused kernels know no soft cap and want
    values with as many channels as keys."""
    if score.math or score.softcap or v.shape[-1] != q.shape[-1]:
        return "math"
    if not q.is_cuda:
        return "cpu"
    if q.dtype == torch.float64 or q.shape[-1] % 8:
        return "math"
    if q.dtype not in HALVES or sight.allowed_1TS is not None or q.shape[-1] > 256:
        return "efficient"
    # What torch takes for whole attention: on an H200 cuDNN's kernel needs 0.62 of the time of flash.
    taken = torch._fused_sdp_choice(q, k, v, is_causal=sight.causal, scale=score.scale, enable_gqa=True)
    return "cudnn" if taken == SDPBackend.CUDNN_ATTENTION.value else "flash"


# By definition -------------------------------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, sight: Sight, score: Score) -> Tensor:
    scores = (q @ _repeated(k, q).transpose(-1, -2)).to(work_dtype(q)) * score.scale
    if score.softcap:
        scores = torch.tanh(scores / score.softcap) * score.softcap
    if sight.causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return scores.masked_fill(future, float("-inf"))
    return scores if sight.allowed_1TS is None else scores.masked_fill(~sight.allowed_1TS, float("-inf"))


def _math(q: Tensor, k: Tensor, v: Tensor, sight: Sight, score: Score) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, sight, score)
    lse = scores.logsumexp(-1)
    return _shares(scores, lse).to(v.dtype) @ _repeated(v, q), lse


def _math_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sight: Sight, score: Score
) -> Gradients:
    work = work_dtype(q)
    scores = _scores(q, k, sight, score)
    shares = _shares(scores, lse)
    grad, out = grad.to(work), out.to(work)
    dv = shares.transpose(-1, -2) @ grad
    dscores = shares * (grad @ _repeated(v, q).to(work).transpose(-1, -2) - (grad * out).sum(-1, keepdim=True))
    if score.softcap:
        # d tanh; where a key is not seen its share is 0, and its score is not a number to square
        dscores = dscores * (1 - (scores.masked_fill(shares == 0, 0.0) / score.softcap).square())
    dscores = dscores * score.scale
    dq, dk = dscores @ _repeated(k, q).to(work), dscores.transpose(-1, -2) @ q.to(work)
    return dq, _summed(dk, k), _summed(dv, v)


def _shares(scores: Tensor, lse: Tensor) -> Tensor:
    """Returns each key's share of the softmax, of shape (B, H, T, S): zero where a query sees nothing, whose LSE is
    -inf."""
    return (scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1)).exp()


# Small parts ---------------------------------------------------------------------------------------------------------


def _bias(q: Tensor, k: Tensor, sight: Sight) -> Tensor | None:
    if sight.allowed_1TS is None:
        return None
    batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    if not q.is_cuda:
        bias = torch.zeros(sight.allowed_1TS.shape, dtype=q.dtype)
        return bias.masked_fill_(~sight.allowed_1TS, float("-inf"))
    # Rows must start at addresses that divide by 16 bytes.
    room = q.new_zeros(*sight.allowed_1TS.shape[:-1], keys + -keys % 8)
    bias = room[..., :keys].masked_fill_(~sight.allowed_1TS, float("-inf"))
    return bias.expand(batch, heads, queries, keys)


def _repeated(x_BKSC: Tensor, q_BHTC: Tensor) -> Tensor:
    groups = q_BHTC.shape[1] // x_BKSC.shape[1]
    return x_BKSC if groups == 1 else x_BKSC.repeat_interleave(groups, dim=1)


def _summed(grad_BHSC: Tensor, x_BKSC: Tensor) -> Tensor:
    """Returns gradients by key-value head (B, K, S, C): those of query heads that share one add up."""
    if grad_BHSC.shape[1] == x_BKSC.shape[1]:
        return grad_BHSC
    return grad_BHSC.unflatten(1, (x_BKSC.shape[1], -1)).sum(2)
