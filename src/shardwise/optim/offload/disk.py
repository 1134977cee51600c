"""Owns one scratch file of one rank: direct, aligned, asynchronous reads and writes, and what can be wrong with its
directory.

Invariant: the file has no name. It is unlinked as soon as it is open, so the system frees it however the process
ends: nothing is left to find or to clean up, and nothing of it is ever trusted again. Checkpoints are the truth. No
torch here. Read next: nvme.py.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from shardwise.errors import UserError

ALIGNMENT = 4096  # bytes, to which O_DIRECT wants offsets, lengths and addresses aligned on every disk we know
BLOCK_BYTES = 4 * 2**20  # bytes per read or write; a pass on a busy virtual disk showed 4 MiB no worse than 1 or 16
QUEUE_DEPTH = 4  # reads or writes under way at a time; that pass showed no clear best of 1, 2, 4 and 8
MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")


class Transfer(NamedTuple):
    """Blocks on their way between a buffer and the file."""

    blocks: list[Future[None]]

    def wait(self) -> None:
        for block in self.blocks:
            block.result()


NOTHING = Transfer([])


class ScratchFile:
    """Is `num_bytes` on a disk, all of it reserved from the start; unwritten parts read as zeros."""

    def __init__(self, directory: Path, num_bytes: int):
        self.num_bytes, self.num_read, self.num_written = aligned(num_bytes), 0, 0
        path = directory / f".shardwise-offload-{os.getpid()}-{id(self)}"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self.is_direct = True
        try:
            self._descriptor = os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno != errno.EINVAL:
                raise _not_writable(directory, error) from None
            self.is_direct = False
            self._descriptor = os.open(path, flags, 0o600)
        path.unlink()
        try:
            if self.num_bytes:
                os.posix_fallocate(self._descriptor, 0, self.num_bytes)
        except OSError as error:
            os.close(self._descriptor)
            raise (_no_room if error.errno in FULL else _not_writable)(directory, error, self.num_bytes) from None
        self._threads = ThreadPoolExecutor(QUEUE_DEPTH, thread_name_prefix="offload")

    def read(self, offset: int, buffer: memoryview) -> Transfer:
        """Starts to fill the buffer with what the file has from `offset` on."""
        self.num_read += len(buffer)
        return self._start(os.preadv, offset, buffer)

    def write(self, offset: int, buffer: memoryview) -> Transfer:
        """Starts to write the buffer, which must not change until that is done."""
        self.num_written += len(buffer)
        return self._start(os.pwritev, offset, buffer)

    def close(self) -> None:
        """Waits for what is under way. The space is free afterwards."""
        self._threads.shutdown()
        with contextlib.suppress(OSError):
            os.close(self._descriptor)

    def _start(self, move: Callable[..., int], offset: int, buffer: memoryview) -> Transfer:
        assert offset % ALIGNMENT == 0 and len(buffer) % ALIGNMENT == 0, (offset, len(buffer))
        assert offset + len(buffer) <= self.num_bytes, (offset, len(buffer), self.num_bytes)
        return self._submit(move, offset, buffer)

    def _submit(self, move: Callable[..., int], offset: int, buffer: memoryview) -> Transfer:
        starts = range(0, len(buffer), BLOCK_BYTES)
        blocks = [(offset + start, buffer[start : start + BLOCK_BYTES]) for start in starts]
        return Transfer([self._threads.submit(self._move, move, *block) for block in blocks])

    def _move(self, move: Callable[..., int], offset: int, block: memoryview) -> None:
        """Reads or writes a block. The system calls let go of Python's lock, so threads are enough to keep a disk
        busy."""
        first = offset
        while block:
            moved = move(self._descriptor, [block], offset)
            if moved <= 0:
                raise OSError(errno.EIO, "the offload file ended early")
            block, offset = block[moved:], offset + moved
        if not self.is_direct:  # pages that the cache keeps would be the memory that was to be saved
            if move is os.pwritev:
                os.fdatasync(self._descriptor)
            os.posix_fadvise(self._descriptor, first, offset - first, os.POSIX_FADV_DONTNEED)


def aligned(num_bytes: int) -> int:
    """Returns the number of bytes, rounded up to a whole number of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def new_buffer(num_bytes: int) -> mmap.mmap:
    """Returns memory whose address is a page's, as direct transfers want it."""
    return mmap.mmap(-1, max(aligned(num_bytes), ALIGNMENT))


# The directory ------------------------------------------------------------------------------------------------------

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_directory(directory: Path, needed: int, *, memory_is_fine: bool) -> None:
    """Refuses a directory that is not there, not writable, not on a disk, or without room for `needed` bytes of all
    ranks of this machine; called before anything is loaded."""
    if not directory.is_dir():
        raise UserError(
            f"the offload directory {directory} is not there",
            why="memory.offload_dir must exist: a directory that is made by mistake may lie on the wrong disk",
            fix=f"mkdir -p {directory}, or memory.offload_dir=DIR",
        )
    kind = filesystem(directory)
    if kind in MEMORY_FILESYSTEMS and not memory_is_fine:
        raise UserError(
            f"the offload directory {directory} is in memory",
            why=f"it is on {kind}: what is moved out there still takes memory",
            fix="memory.offload_dir=DIR on a disk, or memory.offload_tmpfs=true if this is what you want",
        )
    ScratchFile(directory, 0).close()
    free = os.statvfs(directory)
    if free.f_bavail * free.f_frsize < needed:
        raise _no_room(directory, None, needed)


def filesystem(directory: Path) -> str:
    """Returns the type of a directory's file system, as the system's table of mounts has it; an empty text where there
    is no such table."""
    best, kind = "", ""
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    target = str(directory.resolve())
    for line in lines:
        left, _, right = line.partition(" - ")
        mount = left.split()[4].encode().decode("unicode_escape")  # spaces are written as \040
        inside = mount == "/" or target == mount or target.startswith(mount + "/")
        if inside and len(mount) >= len(best):  # a later mount hides an earlier one
            best, kind = mount, right.split()[0]
    return kind


def _no_room(directory: Path, error: OSError | None, needed: int) -> UserError:
    free = os.statvfs(directory)
    return UserError(
        f"no room in the offload directory {directory}",
        why=f"the offloaded state takes {needed / 1e9:.3g} GB, {free.f_bavail * free.f_frsize / 1e9:.3g} GB are free"
        + (f" ({error.strerror})" if error and error.errno != errno.ENOSPC else ""),
        fix="free some space, memory.offload_dir=DIR on a larger disk, or more ranks with parallel.zero=1",
    )


def _not_writable(directory: Path, error: OSError, needed: int = 0) -> UserError:
    return UserError(
        f"cannot write to the offload directory {directory}",
        why=f"{error.strerror or error}",
        fix="memory.offload_dir=DIR, a directory you may write to",
    )
