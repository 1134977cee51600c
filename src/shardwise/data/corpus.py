"""Turns the `[data]` section into rows that can be trained on: the one call the rest of the program makes.

Prepared directories are used as they are. Everything else is prepared once into the cache, under a name that is a
digest of the file listing (sizes and modification times), the tokenizer and the settings, and reused silently
afterwards. Invariant: what comes back holds no token id beyond the model's vocabulary and at least one training
sequence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.chat import ChatTemplate, open_template
from shardwise.data.converted import find_files
from shardwise.data.prepare import prepare
from shardwise.data.quarantine import FILE
from shardwise.data.sequences import Layout, Sequences
from shardwise.data.shards import SCHEMA, TokenStore, is_prepared
from shardwise.data.sources import MAX_TEXT_BYTES, ROW_SUFFIXES, Source, find_source
from shardwise.data.tokenizer import Tokenizer, open_tokenizer
from shardwise.errors import UserError
from shardwise.spec.schema import DataConfig
from shardwise.terminal import counted, say_error

UNIGRAM_SAMPLE = 8_000_000
UNIGRAM_BLOCK = 2**16
SPLIT_SEED = 0  # the held-out documents are the same for every training seed
VALIDATION_SEED = 0
MEANINGFUL_SEQUENCES = 8
MEANINGFUL_TOKENS = 2000
"""Held-out data below either of them is announced: losses of single sequences differ by tenths of a nat."""


@dataclass
class Corpus:
    """Everything there is to train on. `notes` are lines worth showing a person once."""

    tokenizer: Tokenizer
    stores: list[TokenStore]
    train: Sequences
    validation: Sequences
    packing: str
    template: ChatTemplate
    document_mask: bool = False  # documents that share a row do not see each other
    notes: list[str] = field(default_factory=list)

    @property
    def num_bytes(self) -> int:
        return sum(store.num_bytes for store in self.stores)

    @property
    def description(self) -> str:
        title = self.stores[0].title if len(self.stores) == 1 else f"{len(self.stores)} sources"
        return f"{title}, {human_bytes(self.num_bytes)}"

    @property
    def is_chat(self) -> bool:
        """Whether there are conversations in it."""
        return any(store.is_chat for store in self.stores)

    @property
    def fingerprint(self) -> str | None:
        """A digest of the tokens of all sources; None where nobody knows them."""
        if not self.stores:
            return None
        splits = [store.index["splits"] for store in self.stores]
        return hashlib.sha256(json.dumps(splits, sort_keys=True).encode()).hexdigest()

    def about(self, num_samples: int) -> list[str]:
        """Returns lines on what `num_samples` training sequences are taken from, where there are several sources, and
        on held-out data that is too little to mean much."""
        if not self.stores:
            return []
        lines = []
        if len(self.stores) > 1:
            for store, share, layout in zip(self.stores, self.train.shares, self.train.layouts, strict=True):
                epochs = share * num_samples / max(1, layout.count)
                size = f"{counted(layout.count, 'sequence')}, {layout.num_tokens:,} tokens"
                lines.append(f"mix      {share:.1%} from {store.title}: {size}, read {epochs:.2g} times")
        held = self.validation.layouts
        count, tokens = sum(layout.count for layout in held), sum(layout.num_tokens for layout in held)
        if count and (count < MEANINGFUL_SEQUENCES or tokens < MEANINGFUL_TOKENS):
            few = f"held out {counted(count, 'sequence')}, {tokens:,} tokens"
            lines.append(f"{few}: their loss is a coarse measure; a larger data.validation_fraction holds out more")
        return lines

    def unigram_entropy(self) -> float:
        """Returns the entropy, in nats per token, of a model that knows only how frequent each token is, from a sample
        of the training tokens.

        A network must beat it before it has learned anything about order.
        """
        counts = np.zeros(max(store.max_token for store in self.stores) + 1, dtype=np.float64)
        total = sum(store.train.num_tokens for store in self.stores)
        for store in self.stores:
            split = store.train
            num_blocks = -(-split.num_tokens // UNIGRAM_BLOCK)
            stride = max(1, round(total / UNIGRAM_SAMPLE))
            for block in range(0, num_blocks, stride):
                start, end = block * UNIGRAM_BLOCK, min(split.num_tokens, (block + 1) * UNIGRAM_BLOCK)
                tokens = split.tokens(start, end)
                if split.has_mask:
                    tokens = tokens[split.mask(start, end)]
                counts += np.bincount(tokens, minlength=len(counts))
        share = counts[counts > 0] / counts.sum()
        return float(-(share * np.log(share)).sum())

    @property
    def can_begin_anew(self) -> bool:
        """Whether training rows that were read can be read again."""
        return True

    def begin_anew(self) -> None:
        """Makes the training rows ready to be read from any step on, whatever was read of them before."""

    def held_out_start(self, num_tokens: int) -> list[int]:
        """Returns the first tokens of a held-out document (of a training one if none is held out): a prompt for
        samples."""
        splits = [store.validation for store in self.stores] + [store.train for store in self.stores]
        split = next(split for split in splits if split.num_documents)
        end = min(int(split.documents[1]) - 1, num_tokens)
        return split.tokens(0, end).tolist()


def open_corpus(
    data: DataConfig,
    *,
    seq_len: int,
    seed: int,
    vocab: int,
    model_dir: Path | None,
    cache_dir: Path,
    progress: bool,
    can_mask: Callable[[], bool] = lambda: True,
) -> Corpus:
    """Opens (and, the first time, prepares) every source of `data`, and returns them as one corpus. `progress` shows a
    bar and the notes on stderr. `can_mask`: says whether the model can be told which tokens of a row
    belong together, where that is asked."""
    if data.streaming:
        from shardwise.data.stream_corpus import open_stream

        return open_stream(
            data,
            seq_len=seq_len,
            seed=seed,
            vocab=vocab,
            model_dir=model_dir,
            progress=progress,
            can_mask=can_mask,
        )
    names = (data.source,) if isinstance(data.source, str) else tuple(data.source)
    check_mix(names, data.mix)
    prepared = {name: TokenStore(Path(name).expanduser()) for name in names if is_prepared(Path(name).expanduser())}
    tokenizer = _choose_tokenizer(data, model_dir, vocab, prepared)
    template = open_template(data.chat_template, model_dir, tokenizer)
    notes: list[str] = []
    stores = []
    for name in names:
        store = prepared.get(name) or _cached(find_source(name), data, tokenizer, template, cache_dir, progress, notes)
        _check_fits(store, name, tokenizer, vocab)
        if count := store.index.get("quarantined"):
            notes.append(f"{counted(count, 'row')} left out that cannot be used, listed in {store.directory / FILE}")
        stores.append(store)
    has_chat = any(store.is_chat for store in stores)
    packing, document_mask = choose_packing(data, has_chat, can_mask, notes)
    train, validation = _cut(stores, names, data, seq_len, packing, tokenizer.separator, notes)
    corpus = Corpus(
        tokenizer=tokenizer,
        stores=stores,
        train=Sequences(train, seq_len=seq_len, seed=seed, weights=data.mix, document_mask=document_mask),
        validation=Sequences(
            validation, seq_len=seq_len, seed=VALIDATION_SEED, document_mask=document_mask, fixed_order=True
        ),
        packing=packing,
        template=template,
        document_mask=document_mask,
        notes=notes,
    )
    if progress:
        for note in notes:
            say_error(f"data     {note}")
    return corpus


def human_bytes(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def check_mix(names: tuple[str, ...], mix: tuple[float, ...] | None) -> None:
    """Refuses weights that do not go with the sources."""
    if not names:
        raise UserError("no data to train on", why="data.source is an empty list", fix="data.source=python, or a path")
    if mix is None:
        return
    if len(mix) != len(names):
        raise UserError(
            f"data.mix has {counted(len(mix), 'weight')} for {counted(len(names), 'source')}",
            why=f"the sources are {', '.join(names)}",
            fix="give one weight per source, or leave data.mix out to mix by size",
        )
    if any(not weight > 0 or weight == float("inf") for weight in mix):
        raise UserError(
            f"data.mix holds a weight that is not above zero: {', '.join(f'{weight:g}' for weight in mix)}",
            why="a source's weight is its share of the samples",
            fix="leave out sources that are not wanted, weigh the others above 0",
        )


def _choose_tokenizer(
    data: DataConfig, model_dir: Path | None, vocab: int, prepared: dict[str, TokenStore]
) -> Tokenizer:
    """Returns the tokenizer of the config. `auto` is the model's own; without one, it is the one that the prepared data
    was made with."""
    brought = [store.tokenizer() for store in prepared.values()] if data.tokenizer == "auto" else []
    named = [tokenizer for tokenizer in brought if tokenizer.path is not None]
    if named and model_dir is not None and not (model_dir / "tokenizer.json").is_file() and not find_files(model_dir):
        return named[0]
    tokenizer = open_tokenizer(data.tokenizer, model_dir, vocab)
    if data.tokenizer == "auto" and tokenizer.path is None and prepared:
        return next(iter(prepared.values())).tokenizer()
    return tokenizer


def _check_fits(store: TokenStore, name: str, tokenizer: Tokenizer, vocab: int) -> None:
    about = store.index["tokenizer"]
    if about["digest"] != tokenizer.digest:
        same_name = about["name"] == tokenizer.name
        was, now = (f" ({digest[:12]})" if same_name else "" for digest in (about["digest"], tokenizer.digest))
        raise UserError(
            f"{name} was prepared with another tokenizer",
            why=f"its ids come from {about['name']}{was}, this run uses {tokenizer.name}{now}",
            fix=f"prepare it again: shardwise data prepare SOURCE --tokenizer {tokenizer.name} --out DIR",
        )
    if store.max_token >= vocab:
        raise UserError(
            f"token id {store.max_token} is beyond the model's vocabulary of {vocab}",
            why=f"{name} was tokenised by {tokenizer.name}, which has {tokenizer.vocab_size} ids",
            fix=f"model.vocab={tokenizer.vocab_size}, or another data.tokenizer",
        )


def choose_packing(
    data: DataConfig, has_chat: bool, can_mask: Callable[[], bool], notes: list[str]
) -> tuple[str, bool]:
    """Returns how rows are packed, and whether the documents of a row are kept apart: conversations are. Where the
    model cannot do it, each has a row of its own, unless the packing is set."""
    if data.document_mask != "auto" or not has_chat:
        packing = data.packing if data.packing != "auto" else "whole" if has_chat else "stream"
        return packing, data.document_mask is True
    if can_mask():
        return "whole" if data.packing == "auto" else data.packing, True
    if data.packing in ("auto", "single"):
        notes.append("each conversation has a row of its own: this model cannot be told which tokens belong together")
        return "single", False
    notes.append("conversations in one row see each other: this model cannot be told which tokens belong together")
    return data.packing, False


def _cached(
    source: Source,
    data: DataConfig,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    cache_dir: Path,
    progress: bool,
    notes: list[str],
) -> TokenStore:
    directory = cache_dir / _cache_key(source, data, tokenizer, template)
    damaged = False
    if is_prepared(directory):
        try:
            return TokenStore(directory)
        except UserError as error:
            damaged = True
            notes.append(f"the cached tokens of {source.name} were damaged ({error.why}); prepared again")
    try:
        info = prepare(
            [source],
            tokenizer,
            directory,
            template=template,
            validation_fraction=data.validation_fraction,
            seed=SPLIT_SEED,
            text_field=data.text_field,
            bad_rows=data.bad_rows,
            force=damaged,
            progress=progress,
        )
        notes.extend(f"{source.title}: {note}" for note in info.notes)
    except UserError:
        if damaged or not is_prepared(directory):  # otherwise another process has just prepared the same thing
            raise
    return TokenStore(directory)


def _cache_key(source: Source, data: DataConfig, tokenizer: Tokenizer, template: ChatTemplate) -> str:
    has_rows = any(path.name.endswith(ROW_SUFFIXES) for path in source.files)
    parts: dict[str, Any] = {
        "schema": SCHEMA,
        "name": source.title,
        "listing": source.listing_digest,
        "tokenizer": tokenizer.digest,
        "validation_fraction": data.validation_fraction,
        "piece": MAX_TEXT_BYTES,
        "rows": [data.text_field, template.digest] if has_rows else None,
    }
    if has_rows and data.bad_rows != "refuse":
        parts["bad_rows"] = data.bad_rows
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    readable = "".join(
        letter if letter.isalnum() else "-" for letter in ("python" if source.is_python else source.title)
    )[:40]
    return f"{readable}-{digest}"


def _cut(
    stores: list[TokenStore],
    names: tuple[str, ...],
    data: DataConfig,
    seq_len: int,
    packing: str,
    padding: int,
    notes: list[str],
) -> tuple[list[Layout], list[Layout]]:
    train = [Layout(store.train, seq_len, packing, padding) for store in stores]
    validation = [Layout(store.validation, seq_len, packing, padding) for store in stores]
    if data.validation_fraction > 0 and not sum(layout.count for layout in validation):
        train, validation = _hold_out_sequences(train, data.validation_fraction, notes)
    for name, layout in zip(names, train, strict=True):
        if layout.count == 0 and (data.mix is not None or not sum(other.count for other in train)):
            raise UserError(
                f"{name} is shorter than one sequence",
                why=f"it has {layout.split.num_tokens:,} training tokens; a sequence needs train.seq_len + 1 = "
                f"{seq_len + 1:,}",
                fix=f"more text, or train.seq_len={max(2, layout.split.num_tokens // 4)}",
            )
    if packing != "stream":
        num_split = sum(int((np.diff(store.train.documents.astype(np.int64)) > seq_len).sum()) for store in stores)
        if num_split:
            notes.append(
                f"{counted(num_split, 'document')} longer than {seq_len:,} tokens: split over several sequences"
            )
    return train, validation


def _hold_out_sequences(train: list[Layout], fraction: float, notes: list[str]) -> tuple[list[Layout], list[Layout]]:
    """Returns training and held-out layouts where there are too few documents to hold one out: the last sequences of
    each source are held out instead, if it has two or more."""
    kept, held = [], []
    for layout in train:
        count = max(1, round(fraction * layout.count)) if layout.count >= 2 else 0
        kept.append(layout.part(0, layout.count - count))
        held.append(layout.part(layout.count - count, count))
    num_held = sum(layout.count for layout in held)
    if num_held:
        last = f"the last {counted(num_held, 'sequence')} held out instead"
        notes.append(f"too few documents to hold one out for validation: {last}")
    else:
        notes.append("too little data to hold any out: no validation")
    return kept, held
