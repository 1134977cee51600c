"""Decides whether ranks that have ended are started again, without a person, from the newest checkpoint.

Again: a rank that was killed, crashed, or was ended because it held the others up, and a network that failed. Not
again: what somebody asked for, and what would come back (a mistake, a full disk, divergence, memory that a rank itself
found too small). Invariant: a run that keeps failing at one step ends with a verdict, whatever `run.max_restarts` is.
"""

from __future__ import annotations

import time
from contextlib import suppress
from types import FrameType

from shardwise.launch.outcome import RanksEnded, cause_of
from shardwise.launch.verdict import VERDICT, exit_code, in_words, lost_steps
from shardwise.run.guards import answering, stop_signals
from shardwise.run.rundir import RunDir
from shardwise.terminal import counted, say_error

SAME_STEP = 3  # failures at one step in succession: that is no accident
LONGEST_PAUSE_S = 30.0


class Restarts:
    """The restarts of one run while its launcher lives."""

    def __init__(self, run: RunDir, most: int):
        """`most` is how many there may be."""
        self.run, self.most = run, most
        self.done = 0
        self.code = 0  # of the run, once it is not started again
        self._steps: list[int] = []  # the step at which each failure came
        with suppress(OSError):  # of an earlier start
            (run.crash / VERDICT).unlink(missing_ok=True)

    def again(self, ended: RanksEnded) -> bool:
        """Returns whether the ranks are to be started again, after a pause where that may help; else says how the run
        has ended."""
        remark = self._against(ended)
        if remark is not None:
            self.code = exit_code(self.run, ended, remark)
            return False
        cause = cause_of(ended)
        assert cause is not None
        self.done += 1
        step, saved, seconds = lost_steps(self.run)
        pause_s = 0.0 if self._has_moved() else min(2.0 ** (self._num_same() - 2), LONGEST_PAUSE_S)
        from_where = f"from step {saved}" if saved else "from the beginning"
        say_error(f"fault    {cause.fault}: {cause.who}")
        lost, when = in_words(step, saved, seconds), f", in {pause_s:.0f} s" * bool(pause_s)
        say_error(f"restart  {self.done} of at most {self.most}, {from_where} ({lost} to make again){when}")
        about = {"step": saved, "rank": cause.rank, "fault": cause.fault, "host": cause.host, "failed_at": step}
        self.run.append({"event": "restarted", "why": cause.who, **about, "wall_time": time.time()})
        if (number := _pause(pause_s)) is not None:
            self.code = exit_code(self.run, RanksEnded((number,), ended.failures, ended.suspicion))
            return False
        return True

    def _against(self, ended: RanksEnded) -> str | None:
        """Returns what speaks against another start, which may be nothing to say; None where nothing does."""
        if not ended.failures or ended.signals or self.run.stop_request.exists():
            return ""
        cause = cause_of(ended)
        if cause is None or not cause.again or not self.run.is_there():
            return ""
        self._steps.append(lost_steps(self.run)[0])
        if self.done >= self.most:
            return f"it was started again {counted(self.done, 'time')} (run.max_restarts)" if self.most else ""
        if self._num_same() >= SAME_STEP:
            return f"it has failed {self._num_same()} times at this step: another start would not help"
        return None

    def _num_same(self) -> int:
        """Returns how many of the last failures came at the same step."""
        return next((i for i, step in enumerate(reversed(self._steps)) if step != self._steps[-1]), len(self._steps))

    def _has_moved(self) -> bool:
        return self._num_same() == 1


def _pause(seconds: float) -> int | None:
    """Waits, and returns the signal that came meanwhile."""
    came: list[int] = []

    def hear(number: int, frame: FrameType | None) -> None:
        came.append(number)

    with answering(stop_signals(), hear):
        deadline = time.monotonic() + seconds
        while not came and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
    return came[0] if came else None
