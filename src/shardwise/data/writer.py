"""Writes a prepared directory (its layout is described in `shards.py`).

Invariant: the directory appears under its name complete or not at all. Everything is written into a sibling directory
first and renamed at the end; whatever ends the writing early, the sibling is removed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO
from uuid import uuid4

import numpy as np

from shardwise.errors import UserError

SHARD_BYTES = 2**30
BACKFILL = 2**20
ABANDONED_SECONDS = 24 * 3600.0


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
        """Whole documents: their ids in one array, the length of each, and which ids carry loss (None: all)."""
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
        """This split's part of the index."""
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


@contextmanager
def appearing_at_once(out: Path, *, replace: bool) -> Iterator[Path]:
    """A scratch directory beside `out` that takes its name when the block succeeds and vanishes when it does not."""
    scratch = out.with_name(f".{out.name}.partial-{uuid4().hex[:8]}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _sweep_abandoned(out)
        scratch.mkdir()
        yield scratch
        _take_name(scratch, out, replace)
    except OSError as error:
        raise _cannot_write(out, error) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _sweep_abandoned(out: Path) -> None:
    """Removes what a killed process left behind long ago; a living one touches its scratch directory all the time."""
    for left in out.parent.glob(f".{out.name}.partial-*"):
        newest = max((path.stat().st_mtime for path in [left, *left.glob("*")]), default=0.0)
        if time.time() - newest > ABANDONED_SECONDS:
            shutil.rmtree(left, ignore_errors=True)


def _take_name(scratch: Path, out: Path, replace: bool) -> None:
    if not (replace and out.exists()):
        scratch.rename(out)
        return
    old = out.with_name(f".{out.name}.replaced-{uuid4().hex[:8]}")
    out.rename(old)
    try:
        scratch.rename(out)
    except OSError:
        old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _cannot_write(out: Path, error: OSError) -> UserError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return UserError(
            f"no room to write {out}",
            why=f"{error.strerror}; {_free(out)}",
            fix="free some space, or write elsewhere: --out DIR (for training: run.dir=DIR)",
        )
    if error.errno in (errno.EEXIST, errno.ENOTEMPTY) and out.exists():
        return UserError(
            f"{out} appeared while it was being prepared",
            why="another process wrote it first",
            fix="use it as it is, or choose another --out",
        )
    return UserError(
        f"cannot write {out}",
        why=f"{error.strerror or error}" + (f": {error.filename}" if error.filename else ""),
        fix="choose a directory you may write to: --out DIR (for training: run.dir=DIR)",
    )


def _free(out: Path) -> str:
    try:
        return f"{shutil.disk_usage(out.parent).free / 1e9:.1f} GB are free there"
    except OSError:
        return "the disk does not say how much is free"
