"""Ring attention: keys and values travel round the ranks, and each rank's queries attend to them block by block.

Owns who has which tokens (`Zigzag`), which blocks that makes, and the two rings: forward, where K and V travel, and backward,
where dK and dV travel with them. Every message is on its way while a block is computed. Invariant: no rank ever holds more
than its own part of the sequence and one or two parts on their way, and no mask is larger than one block. Ring attention, arXiv 2310.01889;
zigzag order as in Llama 3, arXiv 2407.21783, section 3.3.2. Read next: `blocks.py`, `context.py`.

Shapes: B batch, T tokens of the row, t = T / P of this rank, H heads, K key-value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.masking import Mask
from shardwise.parallel.context.attention_blocks import (
    Score,
    Sight,
    attend_block,
    attend_block_backward,
    merge,
    work_dtype,
)
from shardwise.parallel.traffic import Wait, unseen


class Ring:
    """The line of ranks that pass messages on to the next one."""

    def __init__(self, group: dist.ProcessGroup, wait: Wait = unseen):
        self.wait = wait
        self.group, self.size, self.index = group, group.size(), group.rank()
        self.next = dist.get_global_rank(group, (self.index + 1) % self.size)
        self.previous = dist.get_global_rank(group, (self.index - 1) % self.size)

    def pass_on(self, x: Tensor) -> Callable[[], Tensor]:
        """Starts sending x to the next rank; what is returned waits for what the one before has sent."""
        x = x.contiguous()
        received = torch.empty_like(x)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, self.next, self.group),
                dist.P2POp(dist.irecv, received, self.previous, self.group),
            ]
        )

        def wait(kept: Tensor = x) -> Tensor:  # the message must live until it is sent
            with self.wait("pass on", received.nbytes):
                for work in works:
                    work.wait()
            return received

        return wait


# Who has which tokens, and what that makes to compute ------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """Some of this rank's queries and some of another rank's keys."""

    queries: slice
    keys: slice
    causal: bool = False  # tokens with themselves: for each of them computed before any other block
    masked: bool = False  # some of its pairs are outside the window or in different documents

    @property
    def work(self) -> float:
        """Pairs that are computed."""
        pairs = (self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start)
        return pairs / 2 if self.causal else pairs


@dataclass(frozen=True)
class Zigzag:
    """The row in 2 P pieces: rank i has piece i and piece 2P - 1 - i, one that sees little and one that sees much."""

    size: int
    index: int
    num_tokens: int  # T

    @property
    def piece(self) -> int:
        return self.num_tokens // (2 * self.size)

    def pieces(self, rank: int) -> tuple[int, int]:
        return rank, 2 * self.size - 1 - rank

    def take(self, x_BT: Tensor, rank: int | None = None) -> Tensor:
        """A rank's tokens, in the order it keeps them."""
        first, second = self.pieces(self.index if rank is None else rank)
        pieces = x_BT.unflatten(1, (2 * self.size, -1))
        return torch.cat((pieces[:, first], pieces[:, second]), dim=1)

    def blocks(self, source: int, window: int | None = None) -> list[Block]:
        """What this rank's queries compute with the keys of `source`, as far as order and window decide it."""
        piece, both = self.piece, slice(0, 2 * self.piece)
        first, second = slice(0, piece), slice(piece, 2 * piece)
        if window is None:
            # Three shapes, each half of all pairs: every rank has the same work at every step.
            if source == self.index:
                return [Block(both, both, causal=True)]
            return [Block(both, first)] if source < self.index else [Block(second, both)]
        found = []
        for rows, query in zip((first, second), self.pieces(self.index), strict=True):
            for columns, key in zip((first, second), self.pieces(source), strict=True):
                away = (query - key) * piece
                if query < key or away - (piece - 1) >= window:
                    continue
                found.append(Block(rows, columns, causal=query == key, masked=away + piece - 1 >= window))
        return sorted(found, key=lambda block: not block.causal)


@dataclass(frozen=True)
class View:
    """What a layer sees in this pass."""

    place: Zigzag
    window: int | None
    documents_BT: Tensor | None  # of the whole row
    device: torch.device

    @cached_property
    def plan(self) -> list[list[Block]]:
        """Blocks by the rank whose keys they need."""
        return [self._with_documents(source) for source in range(self.place.size)]

    def _with_documents(self, source: int) -> list[Block]:
        blocks, ids = self.place.blocks(source, self.window), self._ranges
        if ids is None:
            return blocks
        found = []
        for block in blocks:
            queries, keys = self._span(ids, self.place.index, block.queries), self._span(ids, source, block.keys)
            rows = list(zip(queries, keys, strict=True))
            if all(q[1] < k[0] or k[1] < q[0] for q, k in rows):
                continue  # no document reaches from the keys to the queries
            one = all(q[0] == q[1] == k[0] == k[1] for q, k in rows)
            found.append(block if one else Block(block.queries, block.keys, block.causal, masked=True))
        return found

    @cached_property
    def _ranges(self) -> list[list[tuple[int, int]]] | None:
        """Smallest and largest document of every piece, row by row."""
        if self.documents_BT is None:
            return None
        pieces_BPt = self.documents_BT.unflatten(1, (2 * self.place.size, -1))
        low, high = torch.stack((pieces_BPt.amin(-1), pieces_BPt.amax(-1))).tolist()
        return [list(zip(*row, strict=True)) for row in zip(low, high, strict=True)]

    def _span(self, ids: list[list[tuple[int, int]]], rank: int, part: slice) -> list[tuple[int, int]]:
        piece, mine = self.place.piece, self.place.pieces(rank)
        inside = [mine[half] for half in range(2) if part.start < (half + 1) * piece and part.stop > half * piece]
        return [(min(row[p][0] for p in inside), max(row[p][1] for p in inside)) for row in ids]

    def sight(self, block: Block, source: int) -> Sight:
        if not block.masked:
            return Sight(block.causal)
        row = torch.arange(self.place.num_tokens, device=self.device)[None]
        queries, keys = (
            self._part(row, rank, part)[0] for rank, part in ((self.place.index, block.queries), (source, block.keys))
        )
        distance_TS = queries[:, None] - keys[None]
        allowed_TS = distance_TS >= 0
        if self.window is not None:
            allowed_TS &= distance_TS < self.window
        if self.documents_BT is None:
            return Sight(allowed_1TS=allowed_TS[None, None])
        ours = self._part(self.documents_BT, self.place.index, block.queries)
        theirs = self._part(self.documents_BT, source, block.keys)
        return Sight(allowed_1TS=((ours[:, :, None] == theirs[:, None]) & allowed_TS)[:, None])

    def _part(self, x_BT: Tensor, rank: int, part: slice) -> Tensor:
        return self.place.take(x_BT, rank)[:, part]


# The two rings ---------------------------------------------------------------------------------------------------------


def ring_attention(
    ring: Any,
    view: View,
    q_BtHC: Tensor,
    k_BtKC: Tensor,
    v_BtKC: Tensor,
    _: Mask,
    kernel: str,
    scale: float,
    cap: float,
) -> Tensor:
    """`model.attention.attend` for the tokens of one rank: same arguments, same result."""
    score = Score(scale, cap, kernel == "math")
    return RingAttention.apply(q_BtHC, k_BtKC, v_BtKC, ring, view, score)


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_BtHC: Tensor, k_BtKC: Tensor, v_BtKC: Tensor, ring: Any, view: View, score: Score
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
    q_BtHC: Tensor, k_BtKC: Tensor, v_BtKC: Tensor, ring: Any, view: View, score: Score
) -> tuple[Tensor, Tensor]:
    """The output of this rank's queries, and their LSE."""
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
    ring: Any, view: View, score: Score,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of this rank's queries, and of its keys and values, to which all ranks have added."""
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


def _add(block: Block, total: Tensor, part: Tensor) -> None:
    """Nothing is filled with zeros first: a causal block is the first of its queries and of its keys."""
    if block.causal:
        total.copy_(part)
    else:
        total += part


def _unpack(flat: Tensor, k_BtKC: Tensor, v_BtKC: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values that travelled as one message, heads first."""
    k, v = flat.split([k_BtKC.numel(), v_BtKC.numel()])
    return k.view(k_BtKC.shape).transpose(1, 2), v.view(v_BtKC.shape).transpose(1, 2)


def ring_bytes(size: int, flat_numbers: int, number_bytes: int, work_bytes: int) -> tuple[int, int]:
    """Bytes that one rank sends in forward and in backward, of one layer and micro-batch."""
    forward = (size - 1) * flat_numbers * number_bytes
    return forward, forward + (size - 1) * flat_numbers * work_bytes
