"""Finds the largest micro-batch that fits, from what micro-batches of one and of two sequences really took on this
rank.

Owns the arithmetic; run/micro_batch_search.py sends the two through the engine, and the planner says what a rank
needs besides. Nothing larger is tried: a rank that ran out of memory would leave the others waiting. Invariant: what
is chosen is predicted to need no more than HEADROOM of the limit, or it is 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.spec.cluster import HEADROOM

FRAGMENTS = 0.03
"""Memory fragmentation, as a share of what tensors take: blocks of the allocator that are free, but of the wrong size
for what comes next. Measured bytes do not have them."""


@dataclass(frozen=True)
class MicroBatchMemory:
    """Bytes that one micro-batch took at most: what forward keeps for backward, and what came and went beside it."""

    activations: int
    temporary: int


@dataclass(frozen=True)
class MemoryGrowth:
    """Bytes of a micro-batch of n sequences, as a line through what was measured."""

    one: MicroBatchMemory
    two: MicroBatchMemory | None = None  # without it, n sequences are taken to need n times as much

    def taken(self, size: int) -> MicroBatchMemory:
        """Returns the bytes of a micro-batch of `size` sequences."""
        if self.two is None:
            return MicroBatchMemory(size * self.one.activations, size * self.one.temporary)
        return MicroBatchMemory(
            self.one.activations + (size - 1) * max(0, self.two.activations - self.one.activations),
            self.one.temporary + (size - 1) * max(0, self.two.temporary - self.one.temporary),
        )


def largest_that_fits(
    sizes: Sequence[int], needed_bytes: Callable[[int, MicroBatchMemory], int], growth: MemoryGrowth, limit: int
) -> int:
    """Returns the first of `sizes` (largest first) that fits into `limit` bytes; 1 if none does. `needed_bytes` returns
    all that a rank needs with micro-batches of this size, which take so much."""
    for size in sizes:
        if needed_bytes(size, growth.taken(size)) * (1 + FRAGMENTS) <= HEADROOM * limit:
            return size
    return 1
