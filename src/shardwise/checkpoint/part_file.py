"""Writes one file of a checkpoint: a safetensors file whose bytes reach the disk, and are digested, while the next ones
are fetched.

The bytes go through a few buffers of one chunk each. Threads take the full ones: they compute the digest and write
(both let go of the interpreter's lock), past the system's cache where the file is large and the disk takes that.
Invariant: besides its tensors' source, writing needs BUFFERS chunks of memory, whatever the file's size.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.checkpoint.manifest import CHUNK, Shape
from shardwise.checkpoint.share_out import HeldSlice

BUFFERS = 4
THREADS = 3
PAGE = 4096  # bytes; what is written past the cache begins and ends at a multiple
DIRECT_FROM = 2**20  # bytes of a file from which it is written past the cache

TORCH = {"F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32, "F16": torch.float16,
         "BF16": torch.bfloat16, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
         "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}  # fmt: skip
NAMED = {dtype: name for name, dtype in TORCH.items()}


class SliceSource(NamedTuple):
    """A slice to write, the shape of the tensor it is of, and how to get its elements (on any device)."""

    slice: HeldSlice
    whole: Shape
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class WrittenFile:
    """What a manifest says about a file, and about each slice in it: group, name, dtype, whole shape, begin, offsets,
    shape."""

    about: dict[str, Any]
    slices: list[list[Any]]


def write_file(file: Path, sources: Sequence[SliceSource]) -> WrittenFile:
    """Writes slices into a new safetensors file, flushed onto the disk. An element's width must not grow along the
    list."""
    header, begin = _header(sources)
    total = begin + sum(source.slice.nbytes for source in sources)
    slices, at = [], begin
    with _ChunkWriter(file, total) as out:
        out.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for group_slice, whole, read in sources:
            value = read().detach()
            assert tuple(value.shape) == group_slice.shape and NAMED[value.dtype] == group_slice.dtype, group_slice
            out.write(value.contiguous().reshape(-1).view(torch.uint8))
            group, name, dtype, offsets, shape = group_slice
            slices.append([group, name, dtype, list(whole), at, list(offsets), list(shape)])
            at += group_slice.nbytes
        digests = out.finish()
    return WrittenFile({"bytes": total, "digests": digests}, slices)


def _header(sources: Sequence[SliceSource]) -> tuple[bytes, int]:
    """Returns a safetensors header and its length. It ends at a page, so that large tensors begin at one."""
    found, at = {}, 0
    for (_, name, dtype, offsets, shape), whole, _ in sources:
        ranges = ",".join(f"{start}:{start + extent}" for start, extent in zip(offsets, shape, strict=True))
        key = name if shape == whole else f"{name}[{ranges}]"
        end = at + math.prod(shape) * TORCH[dtype].itemsize
        found[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(found, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % PAGE)
    return len(text).to_bytes(8, "little") + text, len(text) + 8


class _ChunkWriter:
    """A file that is written chunk by chunk, by threads."""

    def __init__(self, file: Path, total: int):
        self.file, self.total = file, total
        size = min(CHUNK, -(-total // PAGE) * PAGE)
        self.is_direct = total >= DIRECT_FROM and hasattr(os, "O_DIRECT")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        self.handle = os.open(file, flags, 0o644)
        self.threads = ThreadPoolExecutor(THREADS, "checkpoint-writer")
        self.free = [mmap.mmap(-1, size) for _ in range(min(BUFFERS, -(-total // size)))]
        self.busy: list[tuple[mmap.mmap, Future[str]]] = []
        self.digests: list[str] = []
        self.filled, self.offset = 0, 0  # bytes in the buffer at hand, and in the file before it
        self.buffer, self.view = self._next_buffer()
        if self.is_direct:
            self._write_past_cache(True)

    def __enter__(self) -> _ChunkWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        os.close(self.handle)
        del self.view

    def write(self, data: Tensor) -> None:
        """Appends bytes; waits where all buffers are still being written."""
        done = 0
        while done < data.numel():
            count = min(data.numel() - done, self.view.numel() - self.filled)
            self.view[self.filled : self.filled + count].copy_(data[done : done + count])
            self.filled += count
            done += count
            if self.filled == self.view.numel():
                self._send_off()

    def finish(self) -> list[str]:
        """Waits until everything is on the disk; returns the digest of each chunk."""
        if self.filled:
            self._send_off()
        while self.busy:
            self._take_back()
        os.ftruncate(self.handle, self.total)
        os.fsync(self.handle)
        return self.digests

    def _send_off(self) -> None:
        job = self.threads.submit(self._write_chunk, self.buffer, self.filled, self.offset)
        self.busy.append((self.buffer, job))
        self.offset += self.filled
        self.filled = 0
        if self.offset < self.total:
            self.buffer, self.view = self._next_buffer()

    def _next_buffer(self) -> tuple[mmap.mmap, Tensor]:
        if not self.free:
            self._take_back()
        buffer = self.free.pop()
        return buffer, torch.frombuffer(buffer, dtype=torch.uint8)

    def _take_back(self) -> None:
        buffer, job = self.busy.pop(0)
        self.digests.append(job.result())
        self.free.append(buffer)

    def _write_chunk(self, buffer: mmap.mmap, count: int, offset: int) -> str:
        view = memoryview(buffer)
        digest = hashlib.sha256(view[:count]).hexdigest()
        stop = -(-count // PAGE) * PAGE if self.is_direct else count
        done = 0
        while done < stop:
            try:
                written = os.pwrite(self.handle, view[done:stop], offset + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not self.is_direct:
                    raise OSError(error.errno, error.strerror, str(self.file)) from None
                self._write_past_cache(False)  # this disk wants other multiples, or none
                continue
            done += written
            if done % PAGE:
                self._write_past_cache(False)  # a part: the disk is full, and the next write says so
        return digest

    def _write_past_cache(self, on: bool) -> None:
        import fcntl

        flags = fcntl.fcntl(self.handle, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.handle, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
            self.is_direct = on
        except OSError:
            self.is_direct = False
