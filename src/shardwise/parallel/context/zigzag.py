"""Which tokens of a row a rank has in ring attention, and which blocks of queries and keys that makes.

Pure arithmetic on positions; nothing is sent and nothing attends here. Invariants: with full causal attention every
rank has the same work at every step of the ring, and no mask is larger than one block. The zigzag order is that of
Llama 3, arXiv 2407.21783, section 3.3.2. Read next: ring.py.

Shapes: B batch, T tokens of the row, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shardwise.parallel.context.attention_blocks import Sight


@dataclass(frozen=True)
class QueryKeyBlock:
    """Some of this rank's queries and some of another rank's keys."""

    queries: slice
    keys: slice
    causal: bool = False  # tokens with themselves: for each of them computed before any other block
    masked: bool = False  # some of its pairs are outside the window or in different documents

    @property
    def work(self) -> float:
        """Returns the number of pairs of query and key that are computed."""
        pairs = (self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start)
        return pairs / 2 if self.causal else pairs


@dataclass(frozen=True)
class Zigzag:
    """A row in 2 P pieces, of which rank i has piece i and piece 2P - 1 - i: one that sees little and one that sees
    much."""

    size: int
    index: int
    num_tokens: int  # T

    @property
    def piece(self) -> int:
        """Returns the number of tokens of one piece."""
        return self.num_tokens // (2 * self.size)

    def pieces(self, rank: int) -> tuple[int, int]:
        """Returns the indices of a rank's two pieces."""
        return rank, 2 * self.size - 1 - rank

    def take(self, x_BT: Tensor, rank: int | None = None) -> Tensor:
        """Returns a rank's tokens (this rank's by default) of a whole row, in the order it keeps them: (B, T / P)."""
        first, second = self.pieces(self.index if rank is None else rank)
        pieces = x_BT.unflatten(1, (2 * self.size, -1))
        return torch.cat((pieces[:, first], pieces[:, second]), dim=1)

    def blocks(self, source: int, window: int | None = None) -> list[QueryKeyBlock]:
        """Returns the blocks of this rank's queries and the keys of rank `source`, as far as order and window decide
        them.
        """
        piece, both = self.piece, slice(0, 2 * self.piece)
        first, second = slice(0, piece), slice(piece, 2 * piece)
        if window is None:
            # Three shapes, each half of all pairs: every rank has the same work at every step.
            if source == self.index:
                return [QueryKeyBlock(both, both, causal=True)]
            return [QueryKeyBlock(both, first)] if source < self.index else [QueryKeyBlock(second, both)]
        found = []
        for rows, query in zip((first, second), self.pieces(self.index), strict=True):
            for columns, key in zip((first, second), self.pieces(source), strict=True):
                away = (query - key) * piece
                if query < key or away - (piece - 1) >= window:
                    continue
                found.append(QueryKeyBlock(rows, columns, causal=query == key, masked=away + piece - 1 >= window))
        return sorted(found, key=lambda block: not block.causal)


@dataclass(frozen=True)
class AttentionView:
    """Which keys a layer's queries may see in this pass: by order, window and documents."""

    place: Zigzag
    window: int | None
    documents_BT: Tensor | None  # of the whole row
    device: torch.device

    @cached_property
    def plan(self) -> list[list[QueryKeyBlock]]:
        """Returns the blocks that this rank computes, by the rank whose keys they need."""
        return [self._with_documents(source) for source in range(self.place.size)]

    def _with_documents(self, source: int) -> list[QueryKeyBlock]:
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
            found.append(block if one else QueryKeyBlock(block.queries, block.keys, block.causal, masked=True))
        return found

    @cached_property
    def _ranges(self) -> list[list[tuple[int, int]]] | None:
        """Returns the smallest and the largest document id of every piece, row by row; None without documents."""
        if self.documents_BT is None:
            return None
        pieces_BPt = self.documents_BT.unflatten(1, (2 * self.place.size, -1))
        low, high = torch.stack((pieces_BPt.amin(-1), pieces_BPt.amax(-1))).tolist()
        return [list(zip(*row, strict=True)) for row in zip(low, high, strict=True)]

    def _span(self, ids: list[list[tuple[int, int]]], rank: int, part: slice) -> list[tuple[int, int]]:
        piece, mine = self.place.piece, self.place.pieces(rank)
        inside = [mine[half] for half in range(2) if part.start < (half + 1) * piece and part.stop > half * piece]
        return [(min(row[p][0] for p in inside), max(row[p][1] for p in inside)) for row in ids]

    def sight(self, block: QueryKeyBlock, source: int) -> Sight:
        """Returns which keys of rank `source` the queries of a block see. A mask is made only where the order of tokens
        does not decide it alone."""
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
