"""Training rows that are tokenised as they are needed: documents in their own order, cut into sequences, shuffled
within a bounded buffer, mixed by weight, again from the beginning at the end.

Every rank reads everything and takes its share, so nothing has to be sent and the order is the same in every layout.
A sequence is known by where its first token stands: the place of its document, and how many of that document's tokens
come before. That is all a checkpoint keeps of a source; what is behind it (the rest of a document, the shuffled
sequences) is made again by reading on from there. Invariant: the rows of a step follow from the sources, the settings
and the seed; cutting is `sequences.py`'s, so that a stream in its own order has the sequences of the prepared corpus.
Read next: `stream_corpus.py`, which opens streams.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardwise.data.chat import ChatTemplate
from shardwise.data.order import combine, mixture, permute, slots_of
from shardwise.data.prepare import encode, is_blank
from shardwise.data.quarantine import Quarantine
from shardwise.data.rows import Document
from shardwise.data.sequences import IGNORE, Batch, Layout
from shardwise.data.shards import MemorySplit
from shardwise.data.sources import Place, Reading, Source, read_from
from shardwise.data.tokenizer import Tokenizer
from shardwise.errors import UserError

BATCH_BYTES = 2**18  # of text that is tokenised at once
BATCH_DOCUMENTS = 512
STATES_KEPT = 16  # the loader is a few steps ahead of the checkpoint
BUFFER_STREAM = 3  # the number of this use of the seed; order.py's callers have 1 and 2


class Documents(Protocol):
    """Documents that can be read from any place. Places are JSON; None is the beginning."""

    title: str
    fingerprint: str
    num_bytes: int

    def read(self, place: Any) -> Iterator[tuple[Document, Any]]: ...


class FileDocuments:
    """The documents of a source's files."""

    def __init__(self, source: Source, reading: Reading):
        self.title, self.num_bytes, self.fingerprint = source.title, source.num_bytes, source.content_digest
        self._source, self._reading = source, reading

    def read(self, place: Any) -> Iterator[tuple[Document, Any]]:
        """Yields the documents behind a place, each with the place behind it."""
        return read_from(self._source, self._reading, Place(*(place or ())))


@dataclass(frozen=True)
class Cutting:
    """How documents become sequences."""

    tokenizer: Tokenizer
    template: ChatTemplate
    seq_len: int
    packing: str
    document_mask: bool
    vocab: int


@dataclass(frozen=True)
class Position:
    """Where a sequence begins: behind `skip` tokens of the first document behind `place`, in pass `epoch`."""

    place: Any = None
    skip: int = 0
    epoch: int = 0


class StreamedRow(NamedTuple):
    """One sequence; `length` is without padding."""

    tokens: np.ndarray
    targets: np.ndarray
    documents: np.ndarray | None
    length: int


class SequenceReader:
    """The sequences of one source, in the order of its documents, from any position on."""

    def __init__(self, documents: Documents, cutting: Cutting):
        self.documents, self.cutting, self.num_lost_answers = documents, cutting, 0
        self.go_to(Position())

    def go_to(self, position: Position) -> None:
        """Reads on from a position. Nothing is opened before the next sequence is asked for."""
        self._epoch, self._place, self._skip = position.epoch, position.place, position.skip
        self._found: Iterator[tuple[Document, Any]] | None = None
        self._is_at_end = False
        self._places: list[Any] = []  # before each document of the tokens at hand
        self._begins = np.zeros(0, dtype=np.int64)  # where they begin; before 0 for what was used already
        self._ids = np.zeros(0, dtype=self.cutting.tokenizer.dtype)
        self._mask = np.zeros(0, dtype=np.uint8)
        self._cut()

    @property
    def position(self) -> Position:
        """The position of the next sequence."""
        start = self._layout.range_of(self._index)[0] if self._index < self._num_final else self._end_of_final()
        number = int(np.searchsorted(self._begins, start, side="right")) - 1
        if number < 0 or start >= len(self._ids):
            return Position(self._place, self._skip, self._epoch)
        return Position(self._places[number], start - int(self._begins[number]), self._epoch)

    def next(self) -> StreamedRow | None:
        """Returns the next sequence; None at the end of the source."""
        while self._index == self._num_final:
            if self._is_at_end:
                return None
            self._read_more()
        batch = Batch(*_padding(1, self.cutting))
        first, last = self._layout.range_of(self._index)
        self._layout.fill(self._index, batch, 0)
        self._index += 1
        documents = None if batch.documents is None else batch.documents[0]
        return StreamedRow(batch.tokens[0].astype(np.int32), batch.targets[0].astype(np.int32), documents, last - first)

    def _end_of_final(self) -> int:
        return self._layout.range_of(self._num_final - 1)[1] if self._num_final else 0

    def _read_more(self) -> None:
        """Drops what was used, and tokenises some more documents."""
        end = self._end_of_final()
        kept = int(np.searchsorted(self._begins, end, side="right")) - 1 if end < len(self._ids) else len(self._begins)
        kept = max(kept, 0)
        self._ids, self._mask = self._ids[end:], self._mask[end:]
        self._places, self._begins = self._places[kept:], self._begins[kept:] - end
        batch: list[Document] = []
        size = 0
        if self._found is None:
            self._found = self.documents.read(self._place)
        while size < BATCH_BYTES and len(batch) < BATCH_DOCUMENTS:
            document, behind = next(self._found, (None, None))
            if document is None:
                self._is_at_end = True
                break
            if not is_blank(document):
                batch.append(document)
                self._places.append(self._place)
                size += len(document.text) if document.text is not None else document.num_bytes
            self._place = behind
        for _, run in groupby(batch, key=lambda one: one.messages is None):
            self._append(list(run))
        self._cut()

    def _append(self, batch: list[Document]) -> None:
        cutting = self.cutting
        found = encode(batch, cutting.tokenizer, cutting.template)
        self.num_lost_answers += found.num_lost_answers
        if len(found.ids) and int(found.ids.max()) >= cutting.vocab:
            raise UserError(
                f"token id {int(found.ids.max())} is beyond the model's vocabulary of {cutting.vocab}",
                why=f"{self.documents.title} was tokenised by {cutting.tokenizer.name}, which has "
                f"{cutting.tokenizer.vocab_size} ids",
                fix=f"model.vocab={cutting.tokenizer.vocab_size}, or another data.tokenizer",
            )
        mask = np.ones(len(found.ids), dtype=np.uint8) if found.mask is None else found.mask
        begins = len(self._ids) + np.concatenate(([0], np.cumsum(found.lengths)[:-1]))
        ids = found.ids
        if self._skip:  # the first document behind a position: some of its tokens were used
            ids, mask, begins = ids[self._skip :], mask[self._skip :], begins - self._skip
            self._skip = 0
        self._ids, self._mask = np.concatenate((self._ids, ids)), np.concatenate((self._mask, mask))
        self._begins = np.concatenate((self._begins, begins)).astype(np.int64)

    def _cut(self) -> None:
        """Finds the sequences that no further document can change."""
        bounds = np.append(np.maximum(self._begins, 0), len(self._ids))
        mask = None if self._mask.all() else self._mask
        split, cutting = MemorySplit(self._ids, mask, bounds), self.cutting
        self._layout = Layout(split, cutting.seq_len, cutting.packing, cutting.tokenizer.separator)
        self._index, self._num_final = 0, self._layout.count
        if cutting.packing == "whole" and not self._is_at_end:
            last = len(self._ids) - cutting.seq_len - 1
            while self._num_final and self._layout.range_of(self._num_final - 1)[0] > last:
                self._num_final -= 1


class StreamedSource:
    """The training sequences of one source: shuffled within a buffer, again from `begin` at the end."""

    def __init__(self, reader: SequenceReader, begin: Position, *, buffer: int, key: int):
        self.reader, self._begin, self._size, self._key = reader, begin, max(1, buffer), key
        self.say: Callable[[str], None] = lambda line: None
        self.go_to(begin, 0)

    def go_to(self, position: Position, taken: int) -> None:
        """Goes on behind `taken` sequences, whose last ones are in the buffer that is filled from `position` on."""
        self._reader_starts = position
        self.taken = taken
        self._buffer: list[StreamedRow] = []

    def take(self) -> StreamedRow:
        """Returns the next sequence."""
        within = self.taken % self._size
        if not self._buffer or within == 0:
            self._fill()
        self.taken += 1
        return self._buffer[int(self._order[within])]

    def state(self) -> dict[str, Any]:
        """Returns where the sequences of the buffer at hand begin, and how many were taken in all."""
        at = self.reader.position if self.taken % self._size == 0 and self._buffer else self._reader_starts
        return {"place": at.place, "skip": at.skip, "epoch": at.epoch, "taken": self.taken}

    def _fill(self) -> None:
        if self._buffer:
            self._reader_starts = self.reader.position
        else:
            self.reader.go_to(self._reader_starts)
        self._buffer = [self._next_row() for _ in range(self._size)]
        window = self.taken // self._size
        keys = np.array([combine(self._key, BUFFER_STREAM, window)], dtype=np.uint64)
        numbers = np.arange(self._size)
        self._order = permute(numbers, self._size, keys) if self._size > 1 else numbers

    def _next_row(self) -> StreamedRow:
        row = self.reader.next()
        if row is not None:
            return row
        epoch = self.reader.position.epoch + 1
        self.say(f"data     pass {epoch + 1} over {self.reader.documents.title} begins")
        self.reader.go_to(replace(self._begin, epoch=epoch))
        row = self.reader.next()
        if row is None:
            raise UserError(
                f"{self.reader.documents.title} has no sequence any more",
                why="it was read to its end and begins anew, without what it had at the start of this run",
                fix="restore the data, or begin anew with what is there",
            )
        return row


class TokenStream:
    """The training rows of streamed sources, step by step."""

    num_sequences = 0  # nobody knows
    has_state = can_repeat = True

    def __init__(
        self,
        make_sources: Callable[[], list[StreamedSource]],
        weights: Sequence[float] | None,
        cutting: Cutting,
        *,
        seed: int,
        settings: dict[str, Any],
        quarantine: Quarantine | None = None,
    ):
        """`settings` say what the order depends on: a checkpoint of others is refused."""
        self._make_sources, self._weights, self._cutting = make_sources, weights, cutting
        self._seed, self._settings = seed, json.loads(json.dumps(settings))  # as a checkpoint gives them back
        self.say: Callable[[str], None] = lambda line: None
        self.quarantine = quarantine  # of what its sources read
        self._sources: list[StreamedSource] = []
        self._next_step: int | None = None
        self._num_drawn = 0
        self._states: dict[int, Any] = {}
        self._lock = threading.Lock()

    @property
    def seq_len(self) -> int:
        return self._cutting.seq_len

    def anew(self) -> TokenStream:
        """Returns the same rows from their beginning, read once more."""
        how: dict[str, Any] = dict(seed=self._seed, settings=self._settings, quarantine=self.quarantine)
        return TokenStream(self._make_sources, self._weights, self._cutting, **how)

    def batch(self, step: int, rows: range, global_batch: int) -> Batch:
        """Returns rows `rows` of the global batch of step `step`, which comes after the step that was asked for last; a
        first step behind others passes over their rows."""
        return stack(self.draw(step, global_batch)[rows.start : rows.stop], self._cutting)

    def draw(self, step: int, global_batch: int) -> list[StreamedRow]:
        """Returns all sequences of a step."""
        with self._lock:
            self._open()
            if self._next_step is None:
                self._draw((step - 1) * global_batch)
            assert self._next_step in (None, step), (self._next_step, step)
            drawn = self._draw(global_batch)
            self._next_step = step + 1
            sources = [source.state() for source in self._sources]
            self._states[step] = {"settings": self._settings, "sources": sources, "drawn": self._num_drawn}
            self._states.pop(step - STATES_KEPT, None)
            return drawn

    def lengths(self, num: int) -> list[int]:
        """Returns how long the first sequences are, without padding."""
        return [row.length for row in self.anew().draw(1, num)]

    def _open(self) -> None:
        if not self._sources:
            self._sources = self._make_sources()
            for source in self._sources:
                source.say = lambda line: self.say(line)

    def _draw(self, count: int) -> list[StreamedRow]:
        samples = np.arange(self._num_drawn, self._num_drawn + count, dtype=np.int64)
        chosen = np.zeros(count, dtype=np.int64)
        if self._weights is not None and count:
            chosen = mixture(samples, slots_of(self._weights), self._seed)[0]
        self._num_drawn += count
        return [self._sources[number].take() for number in chosen]

    def state_after(self, step: int) -> Any:
        """Returns where the stream was when this step had been read, as JSON."""
        state = self._states.get(step)
        return None if state is None else json.loads(json.dumps(state))

    def restore(self, state: Any, next_step: int) -> None:
        """Goes on behind what a `state_after` says, before `next_step` is read. The state of another stream is
        refused."""
        before = state.get("settings", {}) if isinstance(state, dict) else {}
        differing = [key for key, value in self._settings.items() if before.get(key) != value]
        if differing:
            key, was = differing[0], before.get(differing[0])
            is_digest = key in ("data.source", "data.tokenizer")
            changed = "the names or sizes of its files" if key == "data.source" else "its content"
            back = f"shardwise resume RUN --allow {key} {key}={was}".replace(", ", ",")
            raise UserError(
                "the stream is not the one that this run began with",
                why=f"{key}: {changed if is_digest else was} "
                f"{'changed' if is_digest else f'there, {self._settings[key]} now'}",
                fix=f"{'restore it' if is_digest else back}, or begin anew: shardwise resume RUN --from 0",
            )
        self._open()
        for source, about in zip(self._sources, state["sources"], strict=True):
            source.go_to(Position(about["place"], about["skip"], about["epoch"]), about["taken"])
        self._num_drawn, self._next_step, self._states = state["drawn"], next_step, {}


def stack(rows: Sequence[StreamedRow], cutting: Cutting) -> Batch:
    """Returns sequences as one batch."""
    tokens, targets, documents = _padding(len(rows), cutting)
    for number, row in enumerate(rows):
        tokens[number], targets[number] = row.tokens, row.targets
        if documents is not None:
            documents[number] = row.documents
    return Batch(tokens, targets, documents)


def _padding(rows: int, cutting: Cutting) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    shape = (rows, cutting.seq_len)
    return (
        np.full(shape, cutting.tokenizer.separator, dtype=np.int64),
        np.full(shape, IGNORE, dtype=np.int64),
        np.zeros(shape, dtype=np.int32) if cutting.document_mask else None,
    )
