"""Collects reasons to stop: signals, a `stop` file, the time limit, a parent that died. The loop asks once per step; no
step is cut short.

The first Ctrl-C (or SIGTERM) lets the step finish and commits a checkpoint; the second ends the run at once. So
does the first where no step has begun: there is nothing to commit, and large weights take minutes.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from shardwise.errors import Exit
from shardwise.run.hold import KnownDirectory
from shardwise.run.ranks import started_by_torchrun
from shardwise.run.rundir import RunDir
from shardwise.terminal import is_live

ORPHAN_GRACE_S = 60.0  # an orphan that cannot finish its step in this time (its peers are gone) ends by force


LOST_PEER = 105
"""What the process of a rank ends with, for its launcher alone, when all it knows is that another one has failed."""

INTERRUPT: int = getattr(signal, "SIGUSR1", signal.SIGINT)
"""The signal by which the launcher passes Ctrl-C on: a Python that is only just starting does not answer it with a
traceback."""


def stop_signals() -> list[int]:
    """Returns the numbers of the signals that stop a run: Ctrl-C, a scheduler's SIGTERM, and a terminal that is closed
    (unless `nohup` has it ignored)."""
    numbers: list[int] = [signal.SIGINT, signal.SIGTERM]
    hang_up = getattr(signal, "SIGHUP", None)  # not on Windows
    if hang_up is not None and signal.getsignal(hang_up) != signal.SIG_IGN:
        numbers.append(hang_up)
    return numbers


@contextmanager
def answering(numbers: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Has signals answered by `handler`. Python lets the main thread alone do so: elsewhere they stay the program's."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def ending_with(launcher: int | None) -> Iterator[None]:
    """Ends this process at once when the one that started it is gone: for the time in which there is nothing to save.
    `launcher` is that process; None where nobody's end is ours."""
    over = threading.Event()

    def watch() -> None:
        while os.getppid() == launcher:
            if over.wait(1.0):
                return
        if not over.is_set():
            _end_now(Exit.STOPPED)

    if launcher is not None:
        threading.Thread(target=watch, name="launcher watch", daemon=True).start()
    try:
        yield
    finally:
        over.set()


class StopRequests:
    """Remembers why this rank should stop. Used as a context: the signal handlers of before are put back at its end."""

    def __init__(self, run: RunDir, time_limit: float | None, say: Callable[[str], None], launcher: int | None = None):
        """`time_limit` is in seconds. `launcher` is the process whose end is ours too; None for a process that was not
        started by one of ours."""
        self.run, self.say = run, say
        self.deadline = time.monotonic() + time_limit if time_limit else None
        self.has_begun = False  # the loop says so before its first step
        self.code: Exit | None = None
        self.why = ""
        self._over = threading.Event()
        self._launcher = launcher
        self._directory = KnownDirectory(run.path)

    def __enter__(self) -> StopRequests:
        self._answering = answering((*stop_signals(), INTERRUPT), self._on_signal)
        self._answering.__enter__()
        if self._launcher is not None:
            threading.Thread(target=self._watch_launcher, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._answering.__exit__(None, None, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_ctrl_c = number in (signal.SIGINT, INTERRUPT)
        if is_ctrl_c and self._launcher is None and (not self.has_begun or (self.code and not started_by_torchrun())):
            raise KeyboardInterrupt  # the process may be a notebook's or a program's, which goes on
        if is_ctrl_c and (self.code is not None or not self.has_begun):
            _end_now(Exit.INTERRUPTED)  # the launcher says so
        if is_ctrl_c:
            self.code, self.why = Exit.INTERRUPTED, "Ctrl-C"
            with suppress(RuntimeError, OSError):  # the signal may have come in the middle of another print
                self.say("stopping after this step (Ctrl-C again: at once, losing the steps since the last checkpoint)")
        else:
            self.code, self.why = Exit.STOPPED, signal.Signals(number).name

    def check(self) -> Exit | None:
        """Returns what this rank asks for, None for nothing. The loop combines all ranks' answers, so that they stop at
        the same step. Raises when the run directory is gone."""
        self._directory.check()
        if self.code is None and self.run.stop_request.exists():
            self.code, self.why = Exit.STOPPED, self.run.stop_request.read_text() or "`shardwise stop`"
        if self.code is None and self.deadline and time.monotonic() > self.deadline:
            self.code, self.why = Exit.STOPPED, "train.time_limit"
        return self.code

    def _watch_launcher(self) -> None:
        """Asks for a stop when the launcher is gone: it may be killed with no chance to say so, and its ranks must not
        live on."""
        while os.getppid() == self._launcher:
            if self._over.wait(1.0):
                return
        if self.code is None:
            self.code, self.why = Exit.STOPPED, "the launcher is gone"
        if not self._over.wait(ORPHAN_GRACE_S):
            _end_now(Exit.STOPPED)


def _end_now(code: Exit) -> None:
    if is_live():
        os.write(sys.stdout.fileno(), b"\x1b[?25h\n")  # the live view hides the cursor
    os._exit(int(code))
