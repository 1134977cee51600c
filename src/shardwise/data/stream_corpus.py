"""Opens what is streamed: reads the beginning of every source once, to hold sequences out and to refuse at the start
what can be refused there.

Invariant: what is held out is never trained on: each pass over a source begins behind it. Read next: streaming.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from shardwise.data.chat import BUILT_IN, open_template
from shardwise.data.corpus import Corpus, check_mix, choose_packing, human_bytes
from shardwise.data.hub import is_hub_name, open_hub
from shardwise.data.order import combine
from shardwise.data.prepare import is_blank
from shardwise.data.quarantine import Quarantine
from shardwise.data.sequences import IGNORE, Batch
from shardwise.data.shards import is_prepared
from shardwise.data.sources import SUFFIXES, Reading, find_source
from shardwise.data.streaming import (
    Cutting,
    Documents,
    FileDocuments,
    Position,
    SequenceReader,
    StreamedRow,
    StreamedSource,
    TokenStream,
    stack,
)
from shardwise.data.tables import cached_dataset
from shardwise.data.tokenizer import open_tokenizer
from shardwise.errors import UserError
from shardwise.spec.schema import DataConfig
from shardwise.terminal import say_error

SAMPLED_ROWS = 64  # of each source, whose tokens are counted for the unigram entropy


class HeldOutRows:
    """Sequences in memory, in a fixed order that begins again at its end."""

    def __init__(self, rows: list[StreamedRow], cutting: Cutting):
        self.rows, self._cutting, self.num_sequences = rows, cutting, len(rows)

    def batch(self, step: int, rows: range, global_batch: int) -> Batch:
        """Returns rows `rows` of batch `step` (the first is 1)."""
        samples = (step - 1) * global_batch + np.arange(rows.start, rows.stop)
        return stack([self.rows[int(sample) % len(self.rows)] for sample in samples], self._cutting)


@dataclass(frozen=True)
class _Head:
    """The beginning of a source: what is held out, some rows behind that, and where training begins."""

    documents: Documents
    held_out: list[StreamedRow]
    sampled: list[StreamedRow]
    begin: Position
    num_lost_answers: int


class StreamCorpus(Corpus):
    """Streamed sources in the place of prepared text."""

    def __init__(
        self,
        cutting: Cutting,
        heads: list[_Head],
        train: TokenStream,
        weights: tuple[float, ...] | None,
        is_chat: bool,
        notes: list[str],
    ):
        held_out = HeldOutRows([row for head in heads for row in head.held_out], cutting)
        super().__init__(
            cutting.tokenizer,
            [],
            train,  # type: ignore[arg-type]
            held_out,  # type: ignore[arg-type]
            cutting.packing,
            cutting.template,
            cutting.document_mask,
            notes,
        )
        self._heads, self._weights, self._is_chat = heads, weights, is_chat

    @property
    def is_chat(self) -> bool:
        return self._is_chat

    @property
    def fingerprint(self) -> str | None:
        return None  # the stream's own state says it

    @property
    def description(self) -> str:
        """What is trained on, in words."""
        size = sum(head.documents.num_bytes for head in self._heads)
        title = self._heads[0].documents.title if len(self._heads) == 1 else f"{len(self._heads)} sources"
        return f"{title}{f', {human_bytes(size)}' if size else ''}, tokenised while training"

    def about(self, num_samples: int) -> list[str]:
        """Returns lines on the share of each source, where there are several, and on what is held out."""
        lines = []
        if self._weights is not None:
            for head, weight in zip(self._heads, self._weights, strict=True):
                lines.append(f"mix      {weight / sum(self._weights):.1%} from {head.documents.title}")
        if count := self.validation.num_sequences:
            lines.append(f"held out the first {count:,} sequences of the stream{'s' * (len(self._heads) > 1)}")
        return lines

    def unigram_entropy(self) -> float:
        """Returns the entropy, in nats per token, of a model that knows only how frequent each token is, from the first
        sequences."""
        rows = [row for head in self._heads for row in (*head.held_out, *head.sampled)]
        targets = np.concatenate([row.targets[row.targets != IGNORE] for row in rows])
        counts = np.bincount(targets)
        share = counts[counts > 0] / max(1, counts.sum())
        return float(-(share * np.log(share)).sum())

    def begin_anew(self) -> None:
        before = cast(TokenStream, self.train)
        after = before.anew()
        after.say = before.say
        self.train = after  # type: ignore[assignment]

    def held_out_start(self, num_tokens: int) -> list[int]:
        """Returns the first tokens of the first source: a prompt for samples."""
        head = self._heads[0]
        row = (*head.held_out, *head.sampled)[0]
        tokens = row.tokens[: min(num_tokens, row.length)]
        ends = np.flatnonzero(tokens[1:] == self.tokenizer.separator)
        return tokens[: int(ends[0]) + 1 if len(ends) else None].tolist()


def open_stream(
    data: DataConfig,
    *,
    seq_len: int,
    seed: int,
    vocab: int,
    model_dir: Path | None,
    progress: bool,
    can_mask: Callable[[], bool],
) -> StreamCorpus:
    """Opens every source of `data` for reading while training, and returns them as one corpus."""
    names = (data.source,) if isinstance(data.source, str) else tuple(data.source)
    check_mix(names, data.mix)
    tokenizer = open_tokenizer(data.tokenizer, model_dir, vocab)
    template = open_template(data.chat_template, model_dir, tokenizer)
    quarantine = Quarantine() if data.bad_rows == "quarantine" else None
    reading = Reading(text_field=data.text_field, raw_bytes=tokenizer.name == "bytes", quarantine=quarantine)
    sources = [_documents(name, reading) for name in names]
    is_chat = any([_begins_with_chat(documents) for documents in sources])
    notes: list[str] = []
    packing, document_mask = choose_packing(data, is_chat, can_mask, notes)
    cutting = Cutting(tokenizer, template, seq_len, packing, document_mask, vocab)
    weights = _weights(sources, data.mix)
    counts = _held_out_counts(data.held_out, weights)
    heads = [_read_head(documents, cutting, count) for documents, count in zip(sources, counts, strict=True)]
    if not any((row.targets != IGNORE).any() for head in heads for row in (*head.held_out, *head.sampled)):
        raise UserError(
            f"nothing to learn at the beginning of {', '.join(names)}",
            why="no token of its first sequences carries loss: the chat template leaves no answer in a stable place",
            fix="mark answers with {% generation %} in the template, or give another: data.chat_template=FILE",
        )

    def make_sources() -> list[StreamedSource]:
        return [
            StreamedSource(
                SequenceReader(head.documents, cutting),
                head.begin,
                buffer=data.shuffle_buffer,
                key=combine(seed, number),
            )
            for number, head in enumerate(heads)
        ]

    settings: dict[str, Any] = {
        "data.source": [head.documents.fingerprint for head in heads],
        "data.tokenizer": tokenizer.digest,
        "data.mix": weights,
        "data.shuffle_buffer": data.shuffle_buffer,
        "data.held_out": data.held_out,
        "train.seed": seed,
    }
    train = TokenStream(make_sources, weights, cutting, seed=seed, settings=settings, quarantine=quarantine)
    notes += _notes(heads, cutting, reading, is_chat)
    if progress:
        for note in notes:
            say_error(f"data     {note}")
    return StreamCorpus(cutting, heads, train, weights, is_chat, notes)


def _documents(name: str, reading: Reading) -> Documents:
    path = Path(name).expanduser()
    if is_prepared(path):
        raise UserError(
            f"{name} is prepared already",
            why="its tokens are read while training as they are",
            fix="leave data.streaming out",
        )
    if is_hub_name(name) and not name.endswith(SUFFIXES) and not path.exists() and not cached_dataset(name):
        return open_hub(name, reading)
    return FileDocuments(find_source(name), reading)


def _begins_with_chat(documents: Documents) -> bool:
    found = (document for document, _ in documents.read(None) if not is_blank(document))
    first = next(found, None)
    if first is None:
        raise UserError(
            f"no text in {documents.title}",
            why="all of it is empty or blank",
            fix="give data that has some text in it",
        )
    return first.messages is not None


def _weights(sources: list[Documents], mix: tuple[float, ...] | None) -> tuple[float, ...] | None:
    """Returns the share of each source; None for a single one."""
    if len(sources) == 1:
        return None
    unknown = [documents.title for documents in sources if not documents.num_bytes]
    if mix is None and unknown:
        raise UserError(
            f"how much of each source is to be read is not known: {unknown[0]} does not say how large it is",
            why="without weights, sources are mixed by their size",
            fix=f"data.mix={[1.0] * len(sources)}".replace(" ", ""),
        )
    return mix or tuple(float(documents.num_bytes) for documents in sources)


def _held_out_counts(total: int, weights: tuple[float, ...] | None) -> list[int]:
    """Returns how many sequences of each source are held out: its share, at least one."""
    if weights is None or not total:
        return [total] * len(weights or (1,))
    return [max(1, round(total * weight / sum(weights))) for weight in weights]


def _read_head(documents: Documents, cutting: Cutting, num_held_out: int) -> _Head:
    reader = SequenceReader(documents, cutting)
    held_out = _next_rows(reader, num_held_out)
    begin = reader.position
    sampled = _next_rows(reader, SAMPLED_ROWS)
    if not sampled:
        found = len(held_out)
        why = f"a sequence needs train.seq_len + 1 = {cutting.seq_len + 1:,} tokens"
        if found:
            why = f"it has {found:,} sequences of {cutting.seq_len:,} tokens, and data.held_out is {num_held_out:,}"
        raise UserError(
            f"{documents.title} is shorter than {'what is held out of it' if found else 'one sequence'}",
            why=why,
            fix=f"more text, a smaller train.seq_len{f', or data.held_out={found // 10}' if found else ''}",
        )
    return _Head(documents, held_out, sampled, begin, reader.num_lost_answers)


def _next_rows(reader: SequenceReader, count: int) -> list[StreamedRow]:
    rows: list[StreamedRow] = []
    while len(rows) < count and (row := reader.next()) is not None:
        rows.append(row)
    return rows


def _notes(heads: list[_Head], cutting: Cutting, reading: Reading, is_chat: bool) -> list[str]:
    notes = [f"{count:,} {what}, in what was read so far" for what, count in reading.notes.items()]
    if lost := sum(head.num_lost_answers for head in heads):
        notes.append(f"{lost:,} answers without loss so far: the template does not render them in a stable place")
    if is_chat and cutting.template.origin == BUILT_IN:
        notes.append("no chat template came with the model: the built-in one (### role, text) was used")
    return notes
