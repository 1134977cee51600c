"""Reasons to stop: signals, a `stop` file, the time limit, a parent that died. The loop asks once per step; nothing is cut.

The first Ctrl-C (or SIGTERM) lets the step finish and commits a checkpoint; the second ends the process at once.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from shardwise.errors import Exit
from shardwise.run.rundir import RunDir

ORPHAN_GRACE_S = 60.0  # an orphan that cannot finish its step in this time (its peers are gone) ends by force


class StopRequests:
    """Used as a context: the signal handlers of before are put back at its end."""

    def __init__(self, run: RunDir, time_limit: float | None, say: Callable[[str], None]):
        self.run, self.say = run, say
        self.deadline = time.monotonic() + time_limit if time_limit else None
        self.code: Exit | None = None
        self.why = ""
        self._over = threading.Event()
        self._parent = os.getppid()

    def __enter__(self) -> StopRequests:
        self._previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        threading.Thread(target=self._watch_parent, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.code is not None:
            os._exit(int(Exit.INTERRUPTED))
        if number == signal.SIGINT:
            self.code, self.why = Exit.INTERRUPTED, "Ctrl-C"
            self.say("stopping after this step (Ctrl-C again: at once, losing the steps since the last checkpoint)")
        else:
            self.code, self.why = Exit.STOPPED, "SIGTERM"

    def check(self) -> Exit | None:
        """What this rank wants; the loop combines all ranks' answers, so that they stop at the same step."""
        if self.code is None and self.run.stop_request.exists():
            self.code, self.why = Exit.STOPPED, "`shardwise stop`"
        if self.code is None and self.deadline and time.monotonic() > self.deadline:
            self.code, self.why = Exit.STOPPED, "train.time_limit"
        return self.code

    def _watch_parent(self) -> None:
        """The launcher may be killed with no chance to tell us; its children must not live on."""
        while os.getppid() == self._parent:
            if self._over.wait(1.0):
                return
        if self.code is None:
            self.code, self.why = Exit.STOPPED, "the launcher is gone"
        if not self._over.wait(ORPHAN_GRACE_S):
            os._exit(int(Exit.STOPPED))
