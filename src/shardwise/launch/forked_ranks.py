"""Starts ranks as copies of this process (fork), which have its functions and data: for runs from a Python program.

torch's own `start_processes` with fork pickles what a copy returns and ends it when the thread that started it ends.
Here a copy calls one function and its return value is the exit code. Its ranks are waited for as those of local.py are.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import Exit
from shardwise.launch.followed import is_file

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import RunProcsResult

GRACE_S = 30.0
"""How long the other ranks may take to end after one has failed, as torch gives them."""


class ForkedRanks:
    """Ranks that were copied from this process."""

    def __init__(
        self,
        body: Callable[[], int],
        environments: Mapping[int, Mapping[str, str]],
        log: Path,
        attempt: int,
        *,
        is_followed: bool,
    ):
        """`is_followed`: the first rank, too, writes to files, which are shown by who started it."""
        files = {rank: str(log / f"rank{rank}.{attempt}.err") for rank in environments}
        self._files = {rank: file for rank, file in files.items() if rank or is_followed}
        self._errors = files | {0: ""}
        sys.stdout.flush()
        sys.stderr.flush()
        self._running = {rank: self._fork(rank, body, environments[rank]) for rank in environments}
        self._all = dict(self._running)

    def pids(self) -> dict[int, int]:
        """Returns the process of each rank."""
        return self._all

    def wait(self, timeout: float = 0) -> RunProcsResult | None:
        """Returns how the ranks ended, or None while some are running and none has failed, which ends the others."""
        from torch.distributed.elastic.multiprocessing import RunProcsResult
        from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

        failures = {
            rank: ProcessFailure(rank, self._all[rank], code, "") for rank, code in self._ended().items() if code
        }
        if failures:
            self._end()
        if self._running and not failures:
            return None
        return RunProcsResult(failures=failures, stderrs=self._errors)

    def _ended(self) -> dict[int, int]:
        """Returns the exit codes of ranks that have ended since; a signal's is negative."""
        codes = {}
        for rank, pid in list(self._running.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del self._running[rank]
        return codes

    def _end(self) -> None:
        """Ends the ranks that are still running."""
        deadline = time.monotonic() + GRACE_S
        for number in (signal.SIGTERM, signal.SIGKILL):
            for pid in self._running.values():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
            while self._running and time.monotonic() < deadline:
                self._ended()
                time.sleep(0.05)
            deadline += GRACE_S

    def _fork(self, rank: int, body: Callable[[], int], environment: Mapping[str, str]) -> int:
        """Starts a rank and returns its process; never returns in the copy."""
        if pid := os.fork():
            return pid
        code: int = Exit.BUG
        try:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the worker's handlers take over, as in rank.py
            os.environ.update(environment)
            if file := self._files.get(rank):  # else it has the terminal
                for name, number in (("stdout", 1), ("stderr", 2)):
                    path = file.removesuffix("err") + name.removeprefix("std")
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
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
