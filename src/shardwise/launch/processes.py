"""Starts rank processes of this machine and knows how each of them ended: as Pythons of their own, or as copies of this
process (fork), which have the functions and the data of its program.

Nothing here waits, so whoever supervises can answer a signal at any moment (supervisor.py). torchrun's own process API
waits up to a minute for the ranks that are left when one has failed, and does not say which signals it has sent.
Invariant: a signal that we have sent to a rank is noted before it is sent.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen

from shardwise.errors import Exit
from shardwise.launch.followed import is_file
from shardwise.run.guards import stop_signals


@dataclass(frozen=True)
class RankFiles:
    """Where one rank prints to; empty names stand for what this process has."""

    out: str = ""
    err: str = ""


class RankProcesses(ABC):
    """The ranks of one start on this machine, by their number in the whole job."""

    def __init__(self, files: Mapping[int, RankFiles]):
        self.files = dict(files)
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}  # of ranks that have ended; a signal's is negative
        self.ended_at: dict[int, float] = {}  # seconds since 1970
        self.sent: dict[int, set[int]] = {rank: set() for rank in files}  # signals of ours

    @property
    def running(self) -> list[int]:
        """The ranks that have not ended."""
        return [rank for rank in self.pids if rank not in self.codes]

    def look(self) -> list[int]:
        """Returns the ranks that have ended with an error so far."""
        for rank in self.running:
            if (code := self._code(rank)) is not None:
                self.codes[rank], self.ended_at[rank] = code, time.time()
        return [rank for rank, code in self.codes.items() if code]

    def send(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Sends a signal to ranks that are running; None: to all of them."""
        running = self.running
        for rank in running if ranks is None else [rank for rank in ranks if rank in running]:
            self.sent[rank].add(number)
            with suppress(ProcessLookupError):
                os.kill(self.pids[rank], number)
            if number == signal.SIGKILL:  # what it has started goes with it: a rank leads a session of its own
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pids[rank], number)

    @abstractmethod
    def _code(self, rank: int) -> int | None:
        """Returns the exit code of a rank that has ended since, None while it runs."""


class SpawnedRanks(RankProcesses):
    """Ranks that are Pythons of their own."""

    def __init__(
        self,
        arguments: Sequence[str],
        environments: Mapping[int, Mapping[str, str]],
        files: Mapping[int, RankFiles],
        kept: Sequence[int],
    ):
        """`kept` are descriptors of this process that the ranks have too."""
        super().__init__(files)
        self._processes: dict[int, Popen[bytes]] = {}
        for rank, environment in environments.items():
            with ExitStack() as opened:
                ends = (files[rank].out, files[rank].err)
                out, err = (opened.enter_context(open(path, "ab")) if path else None for path in ends)
                command = (sys.executable, *arguments)
                # Ctrl-C in a terminal goes to its whole session: ranks hear of it from us alone.
                process = Popen(
                    command, env=dict(environment), stdout=out, stderr=err, pass_fds=kept, start_new_session=True
                )
            self._processes[rank], self.pids[rank] = process, process.pid

    def _code(self, rank: int) -> int | None:
        return self._processes[rank].poll()


class ForkedRanks(RankProcesses):
    """Ranks that were copied from this process; what `body` returns is their exit code."""

    def __init__(
        self,
        body: Callable[[], int],
        environments: Mapping[int, Mapping[str, str]],
        files: Mapping[int, RankFiles],
    ):
        super().__init__(files)
        sys.stdout.flush()
        sys.stderr.flush()
        for rank, environment in environments.items():
            self.pids[rank] = self._fork(rank, body, environment)

    def _code(self, rank: int) -> int | None:
        found, status = os.waitpid(self.pids[rank], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None

    def _fork(self, rank: int, body: Callable[[], int], environment: Mapping[str, str]) -> int:
        """Starts a rank and returns its process; never returns in the copy."""
        if pid := os.fork():
            return pid
        code: int = Exit.BUG
        try:
            os.setsid()
            for stop in stop_signals():  # until the worker's handlers take over, as in rank.py
                signal.signal(stop, signal.SIG_DFL)
            os.environ.update(environment)
            for name, number, path in (("stdout", 1, self.files[rank].out), ("stderr", 2, self.files[rank].err)):
                if path:  # else it has the terminal
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
                    if not is_file(getattr(sys, name), number):  # a notebook's
                        setattr(sys, name, open(number, "w", encoding="utf-8", closefd=False))  # noqa: SIM115
            code = body()
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(int(code))


def said(files: RankFiles, most: int) -> str:
    """Returns the last `most` characters of what a rank has printed as errors; nothing where it has the terminal."""
    try:
        return Path(files.err).read_text(encoding="utf-8", errors="replace").strip()[-most:] if files.err else ""
    except OSError:
        return ""
