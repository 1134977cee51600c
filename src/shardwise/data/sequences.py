"""Cuts token streams into training rows, and deals rows into batches.

`stream` packing cuts the stream every seq_len tokens. `whole` packing starts a sequence at a document and takes as many
whole documents as fit, padding the rest; `single` takes one. A document longer than a sequence is split over several
(nothing is dropped). Either way a row is one contiguous range of the stream. Invariant: row r of step s is a pure
function of (seed, s, r), the same for every number of ranks, workers and micro-batches; `order.py` has the arithmetic.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass

import numpy as np

from shardwise.data.order import combine, mix64, mixture, permute, slots_of
from shardwise.data.shards import MemorySplit, Split

IGNORE = -100


@dataclass(frozen=True)
class Batch:
    """Rows of a step. `targets` are `tokens` shifted by one, IGNORE where there is no loss; `documents` numbers the
    documents within a row."""

    tokens: np.ndarray
    targets: np.ndarray
    documents: np.ndarray | None

    @property
    def num_targets(self) -> int:
        return int((self.targets != IGNORE).sum())


class Layout:
    """How one split of one source is cut into sequences; sequence i is tokens [starts(i), ends(i)) of the stream."""

    def __init__(self, split: Split | MemorySplit, seq_len: int, packing: str, padding: int):
        self.split, self.seq_len, self.packing, self.padding = split, seq_len, packing, padding
        if packing != "stream":
            starts = whole_document_starts if packing == "whole" else single_document_starts
            self._starts: np.ndarray | None = starts(split.documents, seq_len)
            self.first, self.count = 0, len(self._starts) - 1
        else:
            self._starts = None
            # The last token of a window is predicted from within it, so a window needs one token more than its inputs.
            self.first, self.count = 0, max(0, (split.num_tokens - 1) // seq_len)

    def part(self, first: int, count: int) -> Layout:
        """Returns sequences [first, first + count) of this layout."""
        assert first >= 0 and first + count <= self.count, (first, count, self.count)
        other = copy(self)
        other.first, other.count = self.first + first, count
        return other

    def range_of(self, index: int) -> tuple[int, int]:
        """Returns the first token of a sequence and the one behind its last, as positions in the stream."""
        assert 0 <= index < self.count, (index, self.count)
        index += self.first
        if self._starts is None:
            return index * self.seq_len, (index + 1) * self.seq_len
        return int(self._starts[index]), int(self._starts[index + 1])

    @property
    def num_tokens(self) -> int:
        if self._starts is None:
            return self.count * self.seq_len
        return int(self._starts[self.first + self.count] - self._starts[self.first])

    def fill(self, index: int, batch: Batch, row: int) -> None:
        """Writes sequence `index` into a row of a batch whose arrays hold padding."""
        start, end = self.range_of(index)
        length = end - start
        last = min(end + 1, self.split.num_tokens)
        tokens = self.split.tokens(start, last)
        batch.tokens[row, :length] = tokens[:length]
        targets = tokens[1:]
        if self.split.has_mask:
            targets = np.where(self.split.mask(start + 1, last), targets, IGNORE)
        batch.targets[row, : len(targets)] = targets
        if self.packing != "stream" or batch.documents is not None:
            begins = self._document_starts(start, last)
            # A document's first token is not predicted from the document before it.
            batch.targets[row, begins - 1] = IGNORE
            if batch.documents is not None:
                batch.documents[row] = np.searchsorted(begins, np.arange(self.seq_len), side="right")
                batch.documents[row, length:] = batch.documents[row, length - 1] + 1  # padding is a document of its own

    def _document_starts(self, start: int, last: int) -> np.ndarray:
        """Returns the positions 1, 2, ... of tokens (start, last) at which a document begins, relative to `start`."""
        documents = self.split.documents
        first, stop = np.searchsorted(documents, np.array([start, last - 1], dtype=np.uint64), side="right")
        return documents[first:stop].astype(np.int64) - start


class Sequences:
    """The training (or validation) rows of one or several layouts.

    Without weights an epoch is every sequence of every layout exactly once, in an order drawn anew per epoch. With
    weights each sample picks its source by weight, every source runs through its own epochs, and "one epoch" counts as
    many samples as there are sequences in all. `fixed_order` (validation) repeats the same order forever.
    """

    def __init__(
        self,
        layouts: list[Layout],
        *,
        seq_len: int,
        seed: int,
        weights: tuple[float, ...] | None = None,
        document_mask: bool = False,
        fixed_order: bool = False,
    ):
        self.layouts, self.seq_len, self.seed = layouts, seq_len, seed
        self.document_mask, self.fixed_order = document_mask, fixed_order
        self._ends = np.cumsum([layout.count for layout in layouts])
        self._weights = weights if weights is not None and len(layouts) > 1 else [layout.count for layout in layouts]
        self._slots = slots_of(weights) if weights is not None and len(layouts) > 1 else None

    @property
    def num_sequences(self) -> int:
        return int(self._ends[-1])

    @property
    def shares(self) -> list[float]:
        """Returns which share of the samples comes from each layout."""
        total = max(sum(self._weights), 1e-9)
        return [weight / total for weight in self._weights]

    def batch(self, step: int, rows: range, global_batch: int) -> Batch:
        """Returns rows `rows` of the global batch of step `step` (the first step is 1)."""
        assert step >= 1 and rows.step == 1 and 0 <= rows.start <= rows.stop <= global_batch, (step, rows, global_batch)
        sources, indices = self.locate((step - 1) * global_batch + np.arange(rows.start, rows.stop, dtype=np.int64))
        shape = (len(rows), self.seq_len)
        batch = Batch(
            tokens=np.full(shape, self.layouts[0].padding, dtype=np.int64),
            targets=np.full(shape, IGNORE, dtype=np.int64),
            documents=np.zeros(shape, dtype=np.int32) if self.document_mask else None,
        )
        for row, (source, index) in enumerate(zip(sources, indices, strict=True)):
            self.layouts[source].fill(int(index), batch, row)
        return batch

    def lengths(self, num: int) -> list[int]:
        """Returns how long the first sequences are, without padding."""
        ranges = [self.layouts[source].range_of(int(index)) for source, index in zip(*self.locate(np.arange(num)))]
        return [end - start for start, end in ranges]

    def state_after(self, step: int) -> object:
        """Returns None: what a step reads follows from its number."""
        return None

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns which layout, and which of its sequences, each sample of the endless stream of samples is."""
        assert self.num_sequences > 0, "no sequences to draw from"
        if self._slots is None:
            positions = self._shuffled(samples, self.num_sequences, 0)
            source = np.searchsorted(self._ends, positions, side="right")
            return source, positions - np.concatenate(([0], self._ends[:-1]))[source]
        source, numbers = mixture(samples, self._slots, self.seed)
        index = np.empty_like(numbers)
        for k in np.unique(source):
            chosen = source == k
            index[chosen] = self._shuffled(numbers[chosen], self.layouts[k].count, int(k))
        return source, index

    def _shuffled(self, numbers: np.ndarray, count: int, stream: int) -> np.ndarray:
        epochs, within = np.divmod(numbers, count)
        if self.fixed_order:
            epochs = np.zeros_like(epochs)
        return permute(within, count, mix64(epochs.astype(np.uint64), combine(self.seed, 1, stream)))


def whole_document_starts(documents: np.ndarray, seq_len: int) -> np.ndarray:
    """Returns where each sequence starts when documents stay whole; `documents` are their starts and the end of the
    stream.

    1. a sequence ends at the last document boundary within seq_len of its start;
    2. where there is none, the document at hand is longer than a sequence: it is cut at seq_len and goes on in the
       next.
    """
    boundaries = np.asarray(documents, dtype=np.int64)
    total, position = int(boundaries[-1]), 0
    starts = [0]
    while position < total:
        boundary = int(boundaries[np.searchsorted(boundaries, position + seq_len, side="right") - 1])
        position = boundary if boundary > position else position + seq_len
        starts.append(position)
    return np.array(starts, dtype=np.int64)


def single_document_starts(documents: np.ndarray, seq_len: int) -> np.ndarray:
    """Returns where each sequence starts when each has one document; one that is longer is cut at every seq_len."""
    boundaries = np.asarray(documents, dtype=np.int64)
    parts = -(-np.diff(boundaries) // seq_len)  # of each document
    number = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    return np.append(np.repeat(boundaries[:-1], parts) + number * seq_len, boundaries[-1])
