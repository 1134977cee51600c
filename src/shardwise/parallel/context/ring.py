"""Ring attention: keys and values travel round the ranks, and each rank's queries attend to them block by block.

Owns the two rings: forward, where K and V travel, and backward, where dK and dV travel with them. Every send and
receive is under way while a block is computed. Invariant: no rank ever holds more than its own part of the sequence
and one or two parts on their way. Ring attention, arXiv 2310.01889. Read next: zigzag.py (who has which tokens),
attention_blocks.py, sequence_split.py.

    split    every row over P ranks, two pieces each (zigzag.py)
    held     queries, keys and values of T / P tokens, and the keys and values of one other rank
    sent     forward: keys and values, P - 1 times to the next rank; backward: the same, and their gradients P - 1 times

Shapes: B batch, T tokens of the row, t = T / P of this rank, H heads, K key-value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.attention_kernels import AttentionKernel
from shardwise.model.masking import Mask
from shardwise.parallel.context.attention_blocks import Score, attend_block, attend_block_backward, merge, work_dtype
from shardwise.parallel.context.zigzag import AttentionView, QueryKeyBlock
from shardwise.parallel.traffic import Wait, unseen


class Ring:
    """The ranks that share a sequence, each of which sends to the next one and receives from the one before."""

    def __init__(self, group: dist.ProcessGroup, wait: Wait = unseen):
        self.wait = wait
        self.group, self.size, self.index = group, group.size(), group.rank()
        self.next = dist.get_global_rank(group, (self.index + 1) % self.size)
        self.previous = dist.get_global_rank(group, (self.index - 1) % self.size)

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts sending x to the next rank and returns a function that waits for, and returns, what the previous rank
        has sent."""
        x = x.contiguous()
        received = torch.empty_like(x)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, self.next, self.group),
                dist.P2POp(dist.irecv, received, self.previous, self.group),
            ]
        )

        def wait(kept: Tensor = x) -> Tensor:  # the tensor must live until it is sent
            with self.wait("pass on", received.nbytes):
                for work in works:
                    work.wait()
            return received

        return wait


def ring_attention(
    ring: Any,
    view: AttentionView,
    q_BtHC: Tensor,
    k_BtKC: Tensor,
    v_BtKC: Tensor,
    _: Mask,
    kernel: AttentionKernel,
    scale: float,
    cap: float,
) -> Tensor:
    """Computes `model.attention_kernels.attend` for the tokens of one rank: same arguments, same result (B, t, H,
    C)."""
    score = Score(scale, cap, kernel.name == "math")
    return RingAttention.apply(q_BtHC, k_BtKC, v_BtKC, ring, view, score)


class RingAttention(torch.autograd.Function):
    """Both rings as one operation of autograd."""

    @staticmethod
    def forward(
        ctx: Any, q_BtHC: Tensor, k_BtKC: Tensor, v_BtKC: Tensor, ring: Any, view: AttentionView, score: Score
    ) -> Tensor:
        out_BtHC, lse = ring_forward(q_BtHC, k_BtKC, v_BtKC, ring, view, score)
        ctx.save_for_backward(q_BtHC, k_BtKC, v_BtKC, out_BtHC, lse)
        ctx.ring, ctx.view, ctx.score = ring, view, score
        return out_BtHC

    @staticmethod
    def backward(ctx: Any, grad_BtHC: Tensor) -> tuple[Any, ...]:
        q_BtHC, k_BtKC, v_BtKC, out_BtHC, lse = ctx.saved_tensors
        ours = (ctx.ring, ctx.view, ctx.score)
        return *ring_backward(grad_BtHC, q_BtHC, k_BtKC, v_BtKC, out_BtHC, lse, *ours), None, None, None


def ring_forward(
    q_BtHC: Tensor, k_BtKC: Tensor, v_BtKC: Tensor, ring: Any, view: AttentionView, score: Score
) -> tuple[Tensor, Tensor]:
    """Returns the output (B, t, H, C) of this rank's queries, and their LSE (B, H, t)."""
    q, work = q_BtHC.transpose(1, 2), work_dtype(q_BtHC)
    out_BtHC = q.new_empty(*q_BtHC.shape[:3], v_BtKC.shape[-1], dtype=work)
    out, lse = out_BtHC.transpose(1, 2), q.new_empty(q.shape[:3], dtype=work)
    flat = torch.cat((k_BtKC.flatten(), v_BtKC.flatten()))
    for step in range(ring.size):
        source = (ring.index - step) % ring.size
        arriving = ring.pass_on(flat) if step < ring.size - 1 else None
        k, v = _unpack(flat, k_BtKC, v_BtKC)
        for block in view.plan[source]:
            rows, columns = block.queries, block.keys
            more = attend_block(q[:, :, rows], k[:, :, columns], v[:, :, columns], view.sight(block, source), score)
            if block.causal:
                out[:, :, rows], lse[:, :, rows] = more  # the first of these queries
            else:
                merge(out[:, :, rows], lse[:, :, rows], *more)
        if arriving is not None:
            flat = arriving()
    return out_BtHC.to(q.dtype), lse


def ring_backward(
    grad_BtHC: Tensor, q_BtHC: Tensor, k_BtKC: Tensor, v_BtKC: Tensor, out_BtHC: Tensor, lse: Tensor,
    ring: Any, view: AttentionView, score: Score,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Returns the gradients of this rank's queries, keys and values; those of keys and values are summed over the
    queries of all ranks."""
    grad, q, out = (x.transpose(1, 2) for x in (grad_BtHC.contiguous(), q_BtHC, out_BtHC))
    work = work_dtype(q)
    dq_BtHC = torch.empty_like(q_BtHC, dtype=work)
    dq = dq_BtHC.transpose(1, 2)
    flat = torch.cat((k_BtKC.flatten(), v_BtKC.flatten()))
    own = torch.empty_like(flat, dtype=work)  # the gradients of our own keys stay here; others carry theirs home
    returning: Callable[[], Tensor] | None = None
    for step in range(ring.size):
        source = (ring.index - step) % ring.size
        arriving = ring.pass_on(flat) if step < ring.size - 1 else None
        k, v = _unpack(flat, k_BtKC, v_BtKC)
        parts = []
        for block in view.plan[source]:
            rows, columns = block.queries, block.keys
            more_dq, *more = attend_block_backward(
                grad[:, :, rows], q[:, :, rows], k[:, :, columns], v[:, :, columns], out[:, :, rows], lse[:, :, rows],
                view.sight(block, source), score,
            )  # fmt: skip
            _add(block, dq[:, :, rows], more_dq)
            parts.append((block, more))
        # What the ranks before us found for these keys travels one step behind the keys, while we computed.
        sums = own if step == 0 else torch.zeros_like(own) if returning is None else returning()
        for block, more in parts:
            for total, part in zip(_unpack(sums, k_BtKC, v_BtKC), more, strict=True):
                _add(block, total[:, :, block.keys], part)
        if step > 0:
            returning = ring.pass_on(sums)
        if arriving is not None:
            flat = arriving()
    assert returning is not None, "a ring has at least two ranks"
    own += returning()
    dk, dv = (part.transpose(1, 2).to(q.dtype) for part in _unpack(own, k_BtKC, v_BtKC))
    return dq_BtHC.to(q.dtype), dk, dv


def _add(block: QueryKeyBlock, total: Tensor, part: Tensor) -> None:
    """Adds a block's part to a total, in place. A causal block, the first of its queries and of its keys, overwrites
    it, so that nothing need be filled with zeros."""
    if block.causal:
        total.copy_(part)
    else:
        total += part


def _unpack(flat: Tensor, k_BtKC: Tensor, v_BtKC: Tensor) -> tuple[Tensor, Tensor]:
    """Returns keys and values (B, K, t, C) that were sent as one flat tensor."""
    k, v = flat.split([k_BtKC.numel(), v_BtKC.numel()])
    return k.view(k_BtKC.shape).transpose(1, 2), v.view(v_BtKC.shape).transpose(1, 2)
