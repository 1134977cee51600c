"""Holds a run directory, so that two runs never write into one, and notices when it is gone.

Whoever trains holds a lock on the directory itself and on the file `lock` in it: the directory's lock holds although
somebody removes the file, and the file's where a network file system cannot lock directories. The system releases both
however a process ends. Invariant: a directory that is removed or replaced while its run trains is never made anew.
"""

from __future__ import annotations

import os
import re
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from shardwise.errors import UserError

try:
    import fcntl
except ImportError:  # not on Windows: there the lock file only informs
    fcntl = None  # type: ignore[assignment]

PATIENCE_S = 1.0  # somebody who only looks whether a run is locked holds the lock for an instant


class Hold:
    """A run directory that this process holds until `close`, or its end."""

    def __init__(self, path: Path):
        """Opens what is locked. Raises OSError where this process may not."""
        self.path = path
        self._numbers = [os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)]
        if fcntl is not None:
            self._numbers.append(os.open(path, os.O_RDONLY))

    def take(self, *, exclusive: bool, patience_s: float = PATIENCE_S) -> bool:
        """Returns whether the locks were taken within `patience_s` seconds. Several processes may hold shared ones at
        once; exclusive ones are held by nobody else."""
        return all(_flock(number, exclusive, patience_s) for number in self._numbers)

    def sign(self) -> None:
        """Writes into the lock file who holds it."""
        os.ftruncate(self._numbers[0], 0)
        os.write(self._numbers[0], f"process {os.getpid()} on {socket.gethostname()}".encode())

    def close(self) -> None:
        for number in self._numbers:
            os.close(number)
        self._numbers = []

    def __enter__(self) -> Hold:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self.close()


def is_held(path: Path) -> bool:
    """Returns whether some process trains in a directory."""
    if fcntl is None:
        return False
    numbers = []
    try:
        for place in (path, path / "lock"):
            with suppress(OSError):
                numbers.append(os.open(place, os.O_RDONLY))
        return not all(_flock(number, True, 0.0) for number in numbers)
    finally:
        for number in numbers:
            os.close(number)


def holder_of(path: Path) -> str:
    """Returns who holds a directory, as the holder has written it."""
    with suppress(OSError):
        if holder := (path / "lock").read_text(errors="replace").strip()[:200]:
            return holder if _state_of(holder) else f"what {holder} has left behind"
    return "another process"


def is_paused(path: Path) -> bool:
    """Returns whether the process that holds a directory is stopped (SIGSTOP, Ctrl-Z); False where nobody can see
    that from here."""
    with suppress(OSError):
        return _state_of((path / "lock").read_text(errors="replace")) == "T"
    return False


def _state_of(holder: str) -> str:
    """Returns the letter of the state of a process that has signed; a question mark where it is of another host."""
    if not (found := re.fullmatch(r"process (\d+) on (\S+)", holder)) or found[2] != socket.gethostname():
        return "?"
    try:
        return Path(f"/proc/{found[1]}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return "" if Path("/proc/self").exists() else "?"


class KnownDirectory:
    """Remembers which directory a path stands for, to see when it no longer does."""

    def __init__(self, path: Path):
        self.path, self._seen = path, _identity(path)

    def check(self) -> None:
        """Raises when the directory was removed, or another one is there now."""
        if self._seen is None or (now := _identity(self.path)) == self._seen:
            return
        raise UserError(
            f"the run directory {self.path} {'is another one now' if now else 'is gone'}",
            why="it was removed, renamed or replaced while its run was training; nothing is written elsewhere for it",
            fix="put it back under its name and `shardwise resume` it, or start a new run",
        )


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _flock(number: int, exclusive: bool, patience_s: float) -> bool:
    if fcntl is None:
        return True
    deadline = time.monotonic() + patience_s
    while True:
        try:
            fcntl.flock(number, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.02)
        except OSError:  # a file system that has no such locks
            return True
