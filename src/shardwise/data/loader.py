"""Delivers batches on time: a background thread reads, packs and (on request) pins the next steps while the current one
runs.

The only file of `data/` that imports torch. Invariant: what `next()` returns depends on the step number alone, never on
timing; a mistake in the thread surfaces in `next()`, in the caller's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from dataclasses import dataclass
from queue import Empty, Full, Queue
from types import TracebackType

import torch

from shardwise.data.sequences import IGNORE, Batch, Sequences

POLL_SECONDS = 0.1


@dataclass(frozen=True)
class TensorBatch:
    """Rows of token ids and their targets, as tensors of [rows, seq_len]."""

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor | None
    row_numbers: torch.Tensor | None = None  # a number for each row, unique among all rows of all steps

    def to(self, device: torch.device) -> TensorBatch:
        """Returns the batch on a device; pinned memory travels while the host goes on."""
        documents = None if self.documents is None else self.documents.to(device, non_blocking=True)
        numbers = None if self.row_numbers is None else self.row_numbers.to(device, non_blocking=True)
        tokens, targets = self.tokens.to(device, non_blocking=True), self.targets.to(device, non_blocking=True)
        return TensorBatch(tokens, targets, documents, numbers)

    def rows(self, first: int, last: int) -> TensorBatch:
        documents = None if self.documents is None else self.documents[first:last]
        numbers = None if self.row_numbers is None else self.row_numbers[first:last]
        return TensorBatch(self.tokens[first:last], self.targets[first:last], documents, numbers)

    def pinned(self) -> TensorBatch:
        documents = None if self.documents is None else self.documents.pin_memory()
        numbers = None if self.row_numbers is None else self.row_numbers.pin_memory()
        return TensorBatch(self.tokens.pin_memory(), self.targets.pin_memory(), documents, numbers)

    def padding(self, rows: int) -> TensorBatch:
        """Returns rows of this length without targets."""
        tokens = self.tokens.new_zeros(rows, self.tokens.shape[1])
        documents = None if self.documents is None else self.documents.new_zeros(rows, self.tokens.shape[1])
        numbers = None if self.row_numbers is None else self.row_numbers.new_zeros(rows)
        return TensorBatch(tokens, torch.full_like(tokens, IGNORE), documents, numbers)

    def padded_to(self, rows: int) -> TensorBatch:
        missing = rows - self.tokens.shape[0]
        if not missing:
            return self
        more = self.padding(missing)
        documents = None
        if self.documents is not None and more.documents is not None:
            documents = torch.cat([self.documents, more.documents])
        numbers = None
        if self.row_numbers is not None and more.row_numbers is not None:
            numbers = torch.cat([self.row_numbers, more.row_numbers])
        tokens, targets = torch.cat([self.tokens, more.tokens]), torch.cat([self.targets, more.targets])
        return TensorBatch(tokens, targets, documents, numbers)


def to_tensors(batch: Batch, row_numbers: torch.Tensor | None = None) -> TensorBatch:
    documents = None if batch.documents is None else torch.from_numpy(batch.documents)
    return TensorBatch(torch.from_numpy(batch.tokens), torch.from_numpy(batch.targets), documents, row_numbers)


def number_rows(step: int, rows: range) -> torch.Tensor:
    """Returns a number for every row, unique among the rows of all steps."""
    return torch.arange(rows.start, rows.stop) + step * 2**32


@dataclass(frozen=True)
class StepBatch:
    """This loader's rows of one step, or of the batch of this number where some are passed over. `num_targets` counts
    the targets with loss in these rows, not in all ranks'."""

    step: int
    microbatches: list[TensorBatch]
    num_targets: int


class Loader:
    """Yields batches first_step, first_step + 1, ... without end; keeps `depth` of them ready."""

    def __init__(
        self,
        sequences: Sequences,
        *,
        global_batch: int,
        rows: range,
        micro_batch: int,
        num_microbatches: int = 0,
        same_shape: bool = False,
        first_step: int = 1,
        passed_over: Collection[int] = (),
        depth: int = 2,
        pin_memory: bool = False,
    ):
        """`first_step` is the number of the first batch; those that are passed over are read, for the sake of streams,
        and dropped. At least `num_microbatches` are made of a step; what the rows do not fill has no targets and
        changes nothing. With `same_shape` every micro-batch has `micro_batch` rows, as pipelines need."""
        assert micro_batch >= 1 and depth >= 1, (micro_batch, depth)
        self._sequences, self._global_batch, self._rows = sequences, global_batch, rows
        self._micro_batch, self._num_microbatches, self._same_shape = micro_batch, num_microbatches, same_shape
        self._pin_memory, self._passed_over = pin_memory, frozenset(passed_over)
        self._ready: Queue[StepBatch | BaseException] = Queue(maxsize=depth)
        self._closing = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._prefetch, args=(first_step,), name="data-prefetch", daemon=True)
        self._thread.start()

    def next(self) -> StepBatch:
        """Returns the next step's batch, and waits for it if need be."""
        if self._failure is not None:
            raise self._failure
        while True:
            if self._closing.is_set():
                raise RuntimeError("the loader is closed")
            try:
                item = self._ready.get(timeout=POLL_SECONDS)
            except Empty:
                continue
            if isinstance(item, BaseException):
                self._failure = item
                raise item
            return item

    def close(self) -> None:
        """Ends the thread; safe to call twice."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prefetch(self, step: int) -> None:
        while not self._closing.is_set():
            try:
                item: StepBatch | BaseException = self._load(step)
            except BaseException as error:  # handed over and raised again by next()
                item = error
            if isinstance(item, BaseException) or step not in self._passed_over:
                self._put(item)
            if isinstance(item, BaseException):
                return
            step += 1

    def _put(self, item: StepBatch | BaseException) -> None:
        while not self._closing.is_set():
            try:
                self._ready.put(item, timeout=POLL_SECONDS)
                return
            except Full:
                continue

    def _load(self, step: int) -> StepBatch:
        batch = self._sequences.batch(step, self._rows, self._global_batch)
        tensors = to_tensors(batch, number_rows(step, self._rows))
        micro = cut_microbatches(tensors, self._micro_batch, self._num_microbatches, self._same_shape)
        if self._pin_memory:
            micro = [part.pinned() for part in micro]
        return StepBatch(step, micro, batch.num_targets)


def cut_microbatches(batch: TensorBatch, size: int, at_least: int = 0, same_shape: bool = False) -> list[TensorBatch]:
    """Returns consecutive rows in parts of `size`. Missing parts, and with `same_shape` missing rows, are padded:
    IGNORE has no loss."""
    parts = [batch.rows(first, first + size) for first in range(0, batch.tokens.shape[0], size)]
    while len(parts) < at_least:  # one row is enough to keep step with the other ranks
        parts.append(batch.padding(1))
    if same_shape:
        parts = [part.padded_to(size) for part in parts]
    return parts
