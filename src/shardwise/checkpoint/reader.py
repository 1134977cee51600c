"""Reads slices of a checkpoint's tensors: only the bytes that are needed, straight into their place where they can be.

Whatever layout wrote the slices and whatever box is asked for: the two are intersected. Invariant: besides the box, at
most BLOCK bytes are in memory. Read next: manifest.py.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from shardwise.checkpoint.listing import damaged
from shardwise.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    Group,
    StoredSlice,
    StoredTensor,
    not_ours_to_read,
)
from shardwise.checkpoint.part_file import THREADS, TORCH

BLOCK = 16 * 2**20  # bytes read at once where rows are cut
SHORT_RUN = 64 * 2**10  # bytes below which it is cheaper to read what lies between two runs too


class SliceReader:
    """An open checkpoint. Several threads may read at once."""

    def __init__(self, path: Path, manifest: CheckpointManifest):
        self.path, self.manifest = path, manifest
        self.num_bytes = 0  # read so far
        self._handles: dict[str, int] = {}
        self._lock = Lock()

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def tensors(self, group: str) -> Group:
        """Returns what is known of each tensor of a group, by name."""
        return self.manifest.tensors(group)

    def about(self, group: str, name: str) -> StoredTensor:
        """Returns what is known of a tensor, which must be there."""
        found = self.tensors(group).get(name)
        if found is None:
            raise damaged(self.path / MANIFEST, f"it has no {name} among the tensors of `{group}`")
        return found

    def read(self, group: str, name: str) -> Tensor:
        """Returns a whole tensor, in memory."""
        about = self.about(group, name)
        target = torch.empty(about.shape, dtype=TORCH[about.dtype])
        self.read_into(target, group, name, (0,) * len(about.shape))
        return target

    def read_boxes(self, boxes: Iterable[tuple[Tensor, str, str, Sequence[int]]]) -> None:
        """Fills many tensors, by several threads: what `read_into` is told of each."""
        with ThreadPoolExecutor(THREADS) as threads:
            for _ in threads.map(lambda box: self.read_into(*box), boxes):
                pass

    @torch.no_grad()
    def read_into(self, target: Tensor, group: str, name: str, offsets: Sequence[int]) -> None:
        """Fills a tensor in CPU memory, of whatever number format, with the box of its shape at these offsets."""
        about = self.about(group, name)
        shape = tuple(target.shape)
        if len(shape) != len(about.shape) or any(
            start + extent > size for start, extent, size in zip(offsets, shape, about.shape, strict=True)
        ):
            where = self.path / MANIFEST
            raise damaged(
                where, f"{name} has the shape {list(about.shape)}, and {list(shape)} at {list(offsets)} is needed"
            )
        for one in about.slices:
            starts = [max(start, there) for start, there in zip(offsets, one.offsets, strict=True)]
            stops = [
                min(start + extent, there + size)
                for start, extent, there, size in zip(offsets, shape, one.offsets, one.shape, strict=True)
            ]
            if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
                continue
            part = target
            for dim, (start, stop) in enumerate(zip(starts, stops, strict=True)):
                part = part.narrow(dim, start - offsets[dim], stop - start)
            within = [start - there for start, there in zip(starts, one.offsets, strict=True)]
            self._read_box(part, one, TORCH[about.dtype], within)

    def _read_box(self, target: Tensor, one: StoredSlice, dtype: torch.dtype, begin: list[int]) -> None:
        """Fills `target` with the box of a slice that begins at `begin`."""
        extents = tuple(target.shape)
        cut = max((dim for dim in range(len(extents)) if extents[dim] != one.shape[dim]), default=0)
        strides = [math.prod(one.shape[dim + 1 :]) for dim in range(len(extents))]
        run = math.prod(extents[cut:]) * dtype.itemsize  # bytes that lie together
        if math.prod(extents[:cut]) > 1 and run < SHORT_RUN:
            self._read_rows(target, one, dtype, begin, strides)
            return
        for index in itertools.product(*(range(extent) for extent in extents[:cut])):
            first = sum((begin[d] + (index[d] if d < cut else 0)) * strides[d] for d in range(len(extents)))
            self._read_at(target[index], one.file, one.at + first * dtype.itemsize, dtype)

    def _read_rows(
        self, target: Tensor, one: StoredSlice, dtype: torch.dtype, begin: list[int], strides: list[int]
    ) -> None:
        """Reads whole rows, block by block, and keeps what is wanted of them."""
        step = max(1, BLOCK // (strides[0] * dtype.itemsize))
        for row in range(0, target.shape[0], step):
            part = target[row : row + step]
            rows = torch.empty((part.shape[0], *one.shape[1:]), dtype=dtype)
            at = one.at + (begin[0] + row) * strides[0] * dtype.itemsize
            self._read_at(rows, one.file, at, dtype)
            for dim in range(1, part.ndim):
                rows = rows.narrow(dim, begin[dim], part.shape[dim])
            part.copy_(rows)

    def _read_at(self, target: Tensor, file: str, at: int, dtype: torch.dtype) -> None:
        """Fills a tensor with what lies together from byte `at` on."""
        is_straight = target.dtype == dtype and target.is_contiguous() and target.device.type == "cpu"
        landing = target if is_straight else torch.empty(target.shape, dtype=dtype)
        view = landing.view(-1).view(torch.uint8).numpy().data
        handle, done = self._open(file), 0
        while done < view.nbytes:
            count = os.preadv(handle, [view[done : done + 2**30]], at + done)
            if not count:
                raise damaged(self.path / file, f"it ends at byte {at + done}, inside a tensor")
            done += count
        with self._lock:
            self.num_bytes += done
        if not is_straight:
            target.copy_(landing)

    def _open(self, file: str) -> int:
        with self._lock:
            if file not in self._handles:
                self._handles[file] = open_part(self.path / file, self.manifest.files[file].bytes)
            return self._handles[file]


def open_part(file: Path, size: int) -> int:
    """Returns a descriptor of a checkpoint's file, which must be a regular one (no link) of this size."""
    try:
        handle = os.open(file, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        raise damaged(file, "the file is missing") from None
    except PermissionError:
        raise not_ours_to_read(file) from None
    except OSError as error:
        why = "it is a link, which a checkpoint has none of" if file.is_symlink() else str(error.strerror)
        raise damaged(file, why) from None
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_size != size:
        os.close(handle)
        why = f"it has {found.st_size} bytes of {size}" if stat.S_ISREG(found.st_mode) else "it is no regular file"
        raise damaged(file, why)
    return handle


class TensorsOnDisk(Mapping[str, Tensor]):
    """The tensors of a group by name. Each is read when it is asked for; the last one is kept, of which several parts
    may be wanted."""

    def __init__(self, reader: SliceReader, group: str):
        self.reader, self.group = reader, group
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if self._last is None or self._last[0] != name:
            self._last = (name, self.reader.read(self.group, name))
        return self._last[1]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reader.tensors(self.group))

    def __len__(self) -> int:
        return len(self.reader.tensors(self.group))


@contextmanager
def opened(path: Path, manifest: CheckpointManifest) -> Iterator[SliceReader]:
    """Yields a reader of a checkpoint's slices."""
    reader = SliceReader(path, manifest)
    try:
        yield reader
    finally:
        reader.close()
