"""A disk that nothing is written to: offloaded states have a place in a file, and no file.

What would be read and written is counted (`ScratchFile` does it anyway), and memory between disk and device is made of
tensors that are sizes only. Read next: optim/offload/nvme.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from mmap import mmap
from pathlib import Path

import torch
from torch import Tensor

from shardwise.memory.account import OwnedTensor, Owners
from shardwise.optim.offload.buffer import Disk
from shardwise.optim.offload.disk import NOTHING, ScratchFile, Transfer, aligned
from shardwise.rehearse.program import NO_DISK, DiskUse


class NoFile(ScratchFile):
    """Has a size and counts what would be read and written."""

    def __init__(self, num_bytes: int):
        self.num_bytes, self.num_read, self.num_written, self.is_direct = aligned(num_bytes), 0, 0, True

    def _submit(self, move: Callable[..., int], offset: int, buffer: memoryview) -> Transfer:
        return NOTHING

    def close(self) -> None:
        """Has nothing to free."""


class NoDisk(Disk):
    """The disk of a rank that is rehearsed. It has one file, or none."""

    def __init__(self) -> None:
        super().__init__(Path())
        self.file: ScratchFile | None = None

    def new_file(self, num_bytes: int) -> ScratchFile:
        self.file = NoFile(num_bytes)
        return self.file

    def tensor(self, memory: mmap) -> Tensor:
        return torch.empty(len(memory), dtype=torch.uint8)

    @property
    def use(self) -> DiskUse:
        """Returns the bytes of the file, and those read and written so far."""
        file = self.file
        return NO_DISK if file is None else DiskUse(file.num_bytes, file.num_read, file.num_written)

    def add(self, read: int, written: int) -> None:
        """Counts what is repeated."""
        if self.file is not None:
            self.file.num_read += read
            self.file.num_written += written


def uncounted(disk: NoDisk, owners: Owners) -> Owners:
    """Returns the owners of memory: what they read from the disk, only to say what is whose, is not counted."""

    def held(everything: bool) -> Iterator[OwnedTensor]:
        before = disk.use
        yield from owners(everything)
        disk.add(before.read - disk.use.read, before.written - disk.use.written)

    return held
