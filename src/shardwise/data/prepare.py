"""Turns text into token shards, once: reads documents, tokenises batches of them on all cores, writes a prepared
directory.

Three things overlap: this thread reads documents, a small pool of threads encodes batches (the tokenizers library
leaves the interpreter and uses every core), and finished batches are written in order. At most BATCHES_IN_FLIGHT are
held, so memory does not depend on the size of the corpus. Invariant: which documents are held out depends on their
number alone, and the files are the same byte for byte however many workers there are. Read next: `writer.py`,
`shards.py`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.chat import BUILT_IN, ChatTemplate, encode_conversations, open_template
from shardwise.data.order import mix64
from shardwise.data.progress import ByteProgress
from shardwise.data.quarantine import Quarantine
from shardwise.data.rows import Document
from shardwise.data.shards import FORMAT, SCHEMA, SPLITS, is_prepared
from shardwise.data.sources import Reading, Source, find_source, read_documents
from shardwise.data.tokenizer import Tokenizer
from shardwise.data.writer import SHARD_BYTES, SplitWriter, write_index
from shardwise.errors import UserError
from shardwise.files import appearing_at_once
from shardwise.terminal import counted

BATCHES_IN_FLIGHT = 3
MAX_BATCH_DOCUMENTS = 4096
FILES_LISTED = 1000


@dataclass(frozen=True)
class PreparedInfo:
    """What was written: the directory, its index, and lines worth showing a person."""

    directory: Path
    index: dict[str, Any]
    notes: list[str]

    @property
    def num_tokens(self) -> int:
        return sum(self.index["splits"][name]["tokens"] for name in SPLITS)

    @property
    def num_documents(self) -> int:
        return sum(self.index["splits"][name]["documents"] for name in SPLITS)


@dataclass
class Encoded:
    """Holds one batch after tokenising: `mask` is None when every token carries loss, `text_bytes` is what the
    tokenizer was given."""

    ids: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray | None
    num_bytes: int
    text_bytes: int
    num_lost_answers: int = 0


@dataclass
class _Totals:
    """Counts over all documents that were read."""

    num_bytes: int = 0
    text_bytes: int = 0
    num_documents: int = 0
    max_token: int = -1
    num_lost_answers: int = 0
    has_chat: bool = False
    num_empty: int = 0


def prepare(
    sources: Sequence[str | Source],
    tokenizer: Tokenizer,
    out_dir: Path,
    *,
    template: ChatTemplate | None = None,
    validation_fraction: float = 0.01,
    seed: int = 0,
    text_field: str = "text",
    replace_invalid: bool = False,
    bad_rows: str = "refuse",
    workers: int | None = None,
    force: bool = False,
    progress: bool | Callable[[int, int], None] = False,
    shard_bytes: int = SHARD_BYTES,
) -> PreparedInfo:
    """Tokenises `sources` into `out_dir` and returns what was written. `progress` is a callable (done, total bytes), or
    True for a bar."""
    _check_out(out_dir, force)
    template = template or open_template(None, None, tokenizer)
    found = [find_source(source) if isinstance(source, str) else source for source in sources]
    quarantine = Quarantine() if bad_rows == "quarantine" else None
    reading = Reading(
        text_field=text_field,
        raw_bytes=tokenizer.name == "bytes",
        replace_invalid=replace_invalid,
        quarantine=quarantine,
    )
    total = sum(source.num_bytes for source in found)
    totals = _Totals()
    bar = ByteProgress("tokenising", total)
    report = (
        progress
        if callable(progress)
        else (lambda done, _total: bar(done))
        if progress
        else (lambda done, _total: None)
    )
    with appearing_at_once(out_dir, replace=force) as scratch, bar:
        writers = {name: SplitWriter(scratch, name, tokenizer.dtype, shard_bytes) for name in SPLITS}
        try:
            batches = _batches(_nonempty(found, reading, totals), _batch_bytes(workers))
            for batch in _encode_in_order(batches, tokenizer, template, workers):
                _write(batch, writers, totals, validation_fraction, seed)
                report(totals.num_bytes, total)
            _check_something_to_learn(found, totals, writers)
            splits = {name: writer.close() for name, writer in writers.items()}
        finally:
            for writer in writers.values():
                writer.abandon()
        index = _index(found, tokenizer, template, totals, splits, validation_fraction, seed)
        index["notes"] = _notes(reading, totals, template)
        if quarantine:
            quarantine.write(scratch)
            index["quarantined"] = len(quarantine.lines)
        if tokenizer.path is not None:
            (scratch / "tokenizer.json").write_bytes(tokenizer.content)
        write_index(scratch, index)
    return PreparedInfo(out_dir, index, index["notes"])


def is_held_out(numbers: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Returns which documents, by their number in reading order, belong to the validation split."""
    return mix64(numbers.astype(np.uint64), seed) >> np.uint64(11) < np.uint64(int(fraction * 2**53))


def is_blank(document: Document) -> bool:
    """Returns whether a document has nothing to learn from: it is left out."""
    return document.messages is None and not (document.text and document.text.strip())


def _check_out(out_dir: Path, force: bool) -> None:
    holds_something = out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir()))
    if force and holds_something and not is_prepared(out_dir):
        raise UserError(
            f"will not replace {out_dir}",
            why="it is not a prepared directory; --force replaces only those",
            fix="choose another --out",
        )
    if not force and holds_something:
        raise UserError(
            f"{out_dir} exists already",
            why="prepared data is never overwritten unasked",
            fix="choose another --out, or add --force",
        )


def _nonempty(sources: Sequence[Source], reading: Reading, totals: _Totals) -> Iterator[Document]:
    for source in sources:
        for document in read_documents(source, reading):
            if is_blank(document):
                totals.num_empty += 1
                totals.num_bytes += document.num_bytes
            else:
                if reading.raw_bytes and isinstance(document.text, bytes) and b"\0" in document.text:
                    reading.note("documents with NUL bytes, which were dropped")
                yield document


def _batch_bytes(workers: int | None) -> int:
    """Returns how many bytes of documents are encoded per call: enough to keep every core busy, within bounds that keep
    memory small."""
    cores = workers or os.cpu_count() or 1
    return min(32, max(2, cores)) * 2**20


def _batches(documents: Iterator[Document], batch_bytes: int) -> Iterator[list[Document]]:
    """Yields runs of documents of one kind (text or conversation), of bounded size."""
    for _, run in groupby(documents, key=lambda document: document.messages is None):
        batch: list[Document] = []
        size = 0
        for document in run:
            batch.append(document)
            size += len(document.text) if document.text is not None else document.num_bytes
            if size >= batch_bytes or len(batch) == MAX_BATCH_DOCUMENTS:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch


def _encode_in_order(
    batches: Iterator[list[Document]], tokenizer: Tokenizer, template: ChatTemplate, workers: int | None
) -> Iterator[Encoded]:
    # Two threads suffice: while one batch is inside the tokenizers library on all cores, another's ids are collected.
    num_threads = min(workers or 2, 2)
    waiting: deque[Future[Encoded]] = deque()
    pool = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenise")
    try:
        for batch in batches:
            waiting.append(pool.submit(encode, batch, tokenizer, template))
            if len(waiting) >= BATCHES_IN_FLIGHT:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def encode(batch: list[Document], tokenizer: Tokenizer, template: ChatTemplate) -> Encoded:
    """Returns the ids of documents of one kind, text or conversations."""
    num_bytes = sum(document.num_bytes for document in batch)
    if batch[0].messages is None:
        texts = [document.text or "" for document in batch]
        ids, lengths = tokenizer.encode_documents(texts)
        text_bytes = sum(len(text.encode() if isinstance(text, str) else text) for text in texts)
        return Encoded(ids, lengths, None, num_bytes, text_bytes)
    ids, mask, (lengths, num_lost, text_bytes) = encode_conversations(batch, template, tokenizer)
    return Encoded(ids, lengths, mask, num_bytes, text_bytes, num_lost)


def _write(batch: Encoded, writers: dict[str, SplitWriter], totals: _Totals, fraction: float, seed: int) -> None:
    numbers = np.arange(totals.num_documents, totals.num_documents + len(batch.lengths))
    held_out = is_held_out(numbers, fraction, seed)
    if not held_out.any():
        writers["train"].append(batch.ids, batch.lengths, batch.mask)
    else:
        per_token = np.repeat(held_out, batch.lengths)
        for name, documents, tokens in (("train", ~held_out, ~per_token), ("validation", held_out, per_token)):
            mask = None if batch.mask is None else batch.mask[tokens]
            writers[name].append(batch.ids[tokens], batch.lengths[documents], mask)
    totals.num_documents += len(batch.lengths)
    totals.num_bytes += batch.num_bytes
    totals.text_bytes += batch.text_bytes
    totals.max_token = max(totals.max_token, int(batch.ids.max()))
    totals.num_lost_answers += batch.num_lost_answers
    totals.has_chat |= batch.mask is not None


def _check_something_to_learn(sources: Sequence[Source], totals: _Totals, writers: dict[str, SplitWriter]) -> None:
    names = ", ".join(source.name for source in sources)
    num_files = sum(len(source.files) for source in sources)
    if totals.num_documents == 0:
        raise UserError(
            f"no text in {names}",
            why=f"{counted(num_files, 'file')}, {totals.num_bytes:,} bytes, all of it empty or blank",
            fix="give data that has some text in it",
        )
    if not any(writer.num_trained for writer in writers.values()):
        raise UserError(
            f"nothing to learn in {names}",
            why="the chat template left no answer with loss on it: rendering a conversation up to an answer does not "
            "begin the whole",
            fix="mark answers with {% generation %} in the template, or give another: data.chat_template=FILE",
        )


def _index(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    template: ChatTemplate,
    totals: _Totals,
    splits: dict[str, Any],
    validation_fraction: float,
    seed: int,
) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        "dtype": tokenizer.dtype.name,
        "max_token": totals.max_token,
        "documents": totals.num_documents,
        "bytes": totals.num_bytes,
        "text_bytes": totals.text_bytes,
        "chat": totals.has_chat,
        "chat_template": None if not totals.has_chat else {"origin": template.origin, "sha256": template.digest},
        "validation_fraction": validation_fraction,
        "seed": seed,
        "tokenizer": {
            "name": "bytes" if tokenizer.path is None else "tokenizer.json",
            "digest": tokenizer.digest,
            "vocab_size": tokenizer.vocab_size,
            "separator": tokenizer.separator,
            "special_strings": tokenizer.special_strings,
        },
        "sources": [_about(source) for source in sources],
        "splits": splits,
    }


def _about(source: Source) -> dict[str, Any]:
    listed = list(zip(source.files, source.sizes, strict=True))[:FILES_LISTED]
    return {
        "name": source.name,
        "title": source.title,
        "num_files": len(source.files),
        "bytes": source.num_bytes,
        "sha256_of_listing": source.listing_digest,
        "files": [{"file": source.relative(path), "bytes": size} for path, size in listed],
    }


def _notes(reading: Reading, totals: _Totals, template: ChatTemplate) -> list[str]:
    notes = [f"{count:,} {what}" for what, count in reading.notes.items()]
    num_empty = totals.num_empty - (len(reading.quarantine.lines) if reading.quarantine else 0)
    if num_empty:
        notes.append(f"{num_empty:,} empty documents, left out")
    if totals.num_lost_answers:
        notes.append(
            f"{totals.num_lost_answers:,} answers without loss: the template does not render them in a stable place"
        )
    if totals.has_chat and template.origin == BUILT_IN:
        notes.append("no chat template came with the model: the built-in one (### role, text) was used")
    return notes
