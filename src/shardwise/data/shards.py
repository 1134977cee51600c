"""Opens a prepared directory: token shards, document offsets, loss masks and the index that describes them.

    index.json                counts, dtype, tokenizer, sources, and size and sha256 of every other file
    train-00000.tokens        token ids, raw little-endian `dtype`; the shards of a split are one long stream
    train-00000.mask          one byte per token, 1 = carries loss; absent: every token of the shard does
    train.documents           uint64 starts of the documents in the stream, then its length
    validation...             the same for the held-out documents
    tokenizer.json            a copy, unless the tokenizer is `bytes`

Invariant: what `TokenStore` opens has exactly the sizes its index says. Written by `writer.py`, cut into training rows
by `sequences.py`.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.data.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer
from shardwise.errors import UserError
from shardwise.foreign_json import read_object
from shardwise.terminal import shell_word

SCHEMA = 1
FORMAT = "shardwise-tokens"
SPLITS = ("train", "validation")


class TokenStore:
    """A prepared directory, open for reading."""

    def __init__(self, directory: Path, *, verify: bool = False):
        self.directory = directory
        self.index = read_index(directory)
        self.dtype = np.dtype(self.index["dtype"])
        for entry in self._files():
            _check_size(directory / entry["file"], entry["bytes"])
            if verify:
                check_digest(directory / entry["file"], entry["sha256"])
        self.train, self.validation = (
            Split(directory, self.index["splits"][name], self.dtype, self.max_token) for name in SPLITS
        )

    @property
    def max_token(self) -> int:
        """The largest token id in the directory."""
        return int(self.index["max_token"])

    @property
    def is_chat(self) -> bool:
        return bool(self.index["chat"])

    @property
    def num_bytes(self) -> int:
        """The bytes of text behind the tokens."""
        return int(self.index["bytes"])

    @property
    def title(self) -> str:
        return " + ".join(source["title"] for source in self.index["sources"])

    def tokenizer(self) -> Tokenizer:
        about = self.index["tokenizer"]
        if about["name"] == "bytes":
            return ByteTokenizer()
        return FileTokenizer(
            self.directory / "tokenizer.json",
            separator=about["separator"],
            special_strings=dict(about["special_strings"]),
        )

    def _files(self) -> list[dict[str, Any]]:
        entries = []
        for name in SPLITS:
            split = self.index["splits"][name]
            entries += [
                split["documents_file"],
                *split["shards"],
                *(shard["mask"] for shard in split["shards"] if shard["mask"]),
            ]
        return entries


class Split:
    """One split's tokens as a single long stream, whatever its shards."""

    def __init__(self, directory: Path, about: dict[str, Any], dtype: np.dtype, max_token: int):
        self._directory, self._max_token = directory, max_token
        self.num_tokens, self.num_documents = int(about["tokens"]), int(about["documents"])
        self.num_trained = int(about["trained_tokens"])
        self.has_mask = any(shard["mask"] for shard in about["shards"])
        self.documents = _map(directory / about["documents_file"]["file"], np.dtype(np.uint64), self.num_documents + 1)
        self._starts = [0]
        self._tokens: list[np.ndarray] = []
        self._masks: list[np.ndarray | None] = []
        for shard in about["shards"]:
            count = int(shard["tokens"])
            self._tokens.append(_map(directory / shard["file"], dtype, count))
            self._masks.append(
                _map(directory / shard["mask"]["file"], np.dtype(np.uint8), count) if shard["mask"] else None
            )
            self._starts.append(self._starts[-1] + count)

    def tokens(self, start: int, end: int) -> np.ndarray:
        """Returns tokens [start, end) of the stream, as int64."""
        out = np.empty(end - start, dtype=np.int64)
        for shard, first, last, at in self._parts(start, end):
            out[at : at + last - first] = self._tokens[shard][first:last]
        # What was checked against the vocabulary must hold for every token.
        if len(out) and out.max() > self._max_token:
            raise UserError(
                f"the tokens in {self._directory} are damaged",
                why=f"they hold the id {out.max()}, the index says that the largest is {self._max_token}",
                fix=f"`shardwise data show {shell_word(self._directory)} --verify` names the file; "
                "prepare the data again",
            )
        return out

    def mask(self, start: int, end: int) -> np.ndarray:
        """Returns which of tokens [start, end) carry loss, as bool."""
        out = np.ones(end - start, dtype=bool)
        for shard, first, last, at in self._parts(start, end):
            mask = self._masks[shard]
            if mask is not None:
                out[at : at + last - first] = mask[first:last]
        return out

    def _parts(self, start: int, end: int) -> list[tuple[int, int, int, int]]:
        """Returns (shard, first, last, position in the result) of every shard that [start, end) touches."""
        assert 0 <= start <= end <= self.num_tokens, (start, end, self.num_tokens)
        parts, shard, position = [], bisect_right(self._starts, start) - 1, start
        while position < end:
            stop = min(end, self._starts[shard + 1])
            base = self._starts[shard]
            parts.append((shard, position - base, stop - base, position - start))
            position, shard = stop, shard + 1
        return parts


class MemorySplit:
    """Some documents' tokens as a stream of their own, in memory: what `sequences.py` needs of a `Split`. `mask` is
    None where every token carries loss; `documents` are the starts of the documents, and the end."""

    def __init__(self, tokens: np.ndarray, mask: np.ndarray | None, documents: np.ndarray):
        self._tokens, self._mask, self.documents = tokens, mask, documents.astype(np.uint64)
        self.num_tokens, self.num_documents, self.has_mask = len(tokens), len(documents) - 1, mask is not None

    def tokens(self, start: int, end: int) -> np.ndarray:
        """Returns tokens [start, end) of the stream, as int64."""
        return self._tokens[start:end].astype(np.int64)

    def mask(self, start: int, end: int) -> np.ndarray:
        """Returns which of tokens [start, end) carry loss, as bool."""
        return np.ones(end - start, dtype=bool) if self._mask is None else self._mask[start:end].astype(bool)


def is_prepared(directory: Path) -> bool:
    return (directory / "index.json").is_file()


def read_index(directory: Path) -> dict[str, Any]:
    path = directory / "index.json"
    try:
        index = read_object(path)
        if index["format"] != FORMAT:
            raise KeyError("format")
        if index["schema"] != SCHEMA:
            raise UserError(
                f"{directory} was prepared by another version",
                why=f"its index has schema {index['schema']}, this version reads {SCHEMA}",
                fix="prepare it again: shardwise data prepare SOURCE --out DIR",
            )
        _ = [index[key] for key in ("dtype", "splits", "max_token", "chat", "bytes", "sources", "tokenizer")]
        _ = [index["splits"][name]["shards"] for name in SPLITS]
        _ = np.dtype(index["dtype"]), int(index["max_token"]), int(index["bytes"])
        return index
    except OSError as error:
        raise UserError(
            f"{directory} is not a prepared directory",
            why=f"{path.name}: {error.strerror or error}",
            fix="make one: shardwise data prepare SOURCE --tokenizer bytes --out DIR",
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} does not describe token shards",
            why=f"{type(error).__name__}: {error}",
            fix="prepare the data again: shardwise data prepare SOURCE --out DIR",
        ) from None


def check_digest(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise UserError(
            f"{path} is damaged",
            why=f"its sha256 is {found[:16]}..., the index says {expected[:16]}...",
            fix="copy it again, or prepare the data again",
        )


def _check_size(path: Path, expected: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise UserError(
            f"cannot read {path}", why=error.strerror or str(error), fix="copy it again, or prepare the data again"
        ) from None
    if found != expected:
        raise UserError(
            f"{path} is {'truncated' if found < expected else 'too long'}",
            why=f"the index says {expected:,} bytes, the file has {found:,}",
            fix="copy it again, or prepare the data again",
        )


def _map(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    if count == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=dtype)
    try:
        # As a plain array: slicing np.memmap itself costs several microseconds of bookkeeping per slice.
        return np.asarray(np.memmap(path, dtype=dtype.newbyteorder("<"), mode="r", shape=(count,)))
    except OSError as error:
        raise UserError(f"cannot read {path}", why=error.strerror or str(error), fix="check its permissions") from None
