"""Writes a prepared directory (its layout is described in `shards.py`).

Invariant: the directory appears under its name complete or not at all. Everything is written into a sibling directory
first and renamed at the end; whatever ends the writing early, the sibling is removed.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

SHARD_BYTES = 2**30
BACKFILL = 2**20


class _File:
    """An append-only file that knows its size and digest."""

    def __init__(self, path: Path):
        self.path, self.num_bytes, self._digest = path, 0, hashlib.sha256()
        self._file: BinaryIO = path.open("wb")

    def append(self, array: np.ndarray) -> None:
        data = np.ascontiguousarray(array).data.cast("B")
        self._file.write(data)
        self._digest.update(data)
        self.num_bytes += len(data)

    def close(self) -> dict[str, Any]:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"file": self.path.name, "bytes": self.num_bytes, "sha256": self._digest.hexdigest()}

    def abandon(self) -> None:
        self._file.close()


class SplitWriter:
    """Appends documents to one split, starting a new shard whenever the current one is full."""

    def __init__(self, directory: Path, name: str, dtype: np.dtype, shard_bytes: int = SHARD_BYTES):
        self._directory, self._name, self._dtype = directory, name, dtype.newbyteorder("<")
        self._shard_tokens = max(1, shard_bytes // dtype.itemsize)
        self._documents = _File(directory / f"{name}.documents")
        self._tokens: _File | None = None
        self._mask: _File | None = None
        self._shards: list[dict[str, Any]] = []
        self._in_shard = 0
        self.num_tokens = self.num_documents = self.num_trained = 0

    def append(self, ids: np.ndarray, lengths: np.ndarray, mask: np.ndarray | None) -> None:
        """Appends whole documents: their ids in one array, the length of each, and which ids carry loss (None: all)."""
        assert lengths.sum() == len(ids), (lengths.sum(), len(ids))
        starts = self.num_tokens + np.concatenate(([0], np.cumsum(lengths)[:-1])) if len(lengths) else lengths
        self._documents.append(starts.astype("<u8"))
        self.num_documents += len(lengths)
        position = 0
        while position < len(ids):
            if self._tokens is None:
                self._tokens = _File(self._directory / f"{self._name}-{len(self._shards):05d}.tokens")
            end = min(len(ids), position + self._shard_tokens - self._in_shard)
            self._tokens.append(ids[position:end].astype(self._dtype, copy=False))
            self._append_mask(None if mask is None else mask[position:end], end - position)
            self._in_shard += end - position
            position = end
            if self._in_shard == self._shard_tokens:
                self._close_shard()
        self.num_tokens += len(ids)
        self.num_trained += len(ids) if mask is None else int(mask.sum())

    def _append_mask(self, mask: np.ndarray | None, count: int) -> None:
        if self._mask is None:
            if mask is None or mask.all():
                return
            # The first token without loss: only now is a mask worth a file. Everything before it carries loss.
            self._mask = _File(self._directory / f"{self._name}-{len(self._shards):05d}.mask")
            for first in range(0, self._in_shard, BACKFILL):
                self._mask.append(np.ones(min(BACKFILL, self._in_shard - first), dtype=np.uint8))
        self._mask.append(np.ones(count, dtype=np.uint8) if mask is None else mask.astype(np.uint8, copy=False))

    def _close_shard(self) -> None:
        assert self._tokens is not None
        entry = {**self._tokens.close(), "tokens": self._in_shard, "mask": self._mask.close() if self._mask else None}
        self._shards.append(entry)
        self._tokens, self._mask, self._in_shard = None, None, 0

    def close(self) -> dict[str, Any]:
        """Closes the files and returns this split's part of the index."""
        if self._tokens is not None:
            self._close_shard()
        self._documents.append(np.array([self.num_tokens], dtype="<u8"))
        return {
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "trained_tokens": self.num_trained,
            "documents_file": self._documents.close(),
            "shards": self._shards,
        }

    def abandon(self) -> None:
        for file in (self._documents, self._tokens, self._mask):
            if file is not None:
                file.abandon()


def write_index(directory: Path, index: dict[str, Any]) -> None:
    with (directory / "index.json").open("w", encoding="utf-8") as file:
        json.dump(index, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
