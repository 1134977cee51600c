"""Waits for ranks: passes signals on, ends what does not end by itself, and finds out who holds the others up.

A request to stop is the ranks' to answer: they finish the step and commit. Where nothing moves for the time of a step
with a reserve, they are ended from here, and so they are at the second Ctrl-C. Invariant: this loop never waits for a
rank, so a signal is answered within a tenth of a second, whatever the ranks do.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import FrameType

from shardwise.launch.judge import Patience, Suspicion, suspect
from shardwise.launch.processes import RankProcesses
from shardwise.launch.signs import Watch, main_stack
from shardwise.run.guards import INTERRUPT, LOST_PEER, answering
from shardwise.run.rundir import RunDir
from shardwise.terminal import say_error

LOOK_EVERY_S = 0.1
LAST_WORDS_S = 5.0  # for ranks that have lost another one: they may know more than the first that ended
WITNESS_S = 1.0  # where the first that ended has told why
STOP_S = 10.0  # for a step to end that somebody has asked to be the last
STOP_STEPS = 3.0  # of the longest step so far, where that is more
KILL_S = 30.0  # for the system to end what was killed; longer only where a driver holds it
STACKS_AGAIN_S = 5.0
PAUSE = [signal.SIGTSTP] if hasattr(signal, "SIGTSTP") else []


class JobEnds(Exception):
    """Is raised by who attends to the ranks when they must end, because those of another node have ended."""


class Supervisor:
    """Waits for the ranks of one start."""

    def __init__(
        self,
        run: RunDir,
        ranks: RankProcesses,
        watch: Watch,
        patience: Patience,
        attend: Callable[[], None],
        asked: list[int],
        *,
        is_whole: bool,
    ):
        """`attend` is called again and again; what it raises ends the ranks. `asked` are the signals that have come and
        those that are still to come, to be passed on. `is_whole`: they are all of the job."""
        self.run, self.ranks, self.watch, self.patience, self.attend = run, ranks, watch, patience, attend
        self.is_whole = is_whole
        self.asked = asked
        self.suspicion: Suspicion | None = None  # who held the others up, and was ended for it
        self.impatience = ""  # why ranks that were asked to stop were ended
        self._passed_on = 0
        self._stop_by = self._end_by = float("inf")  # by the clock of `time.monotonic`
        self._looked_at_stacks = float("-inf")

    def wait(self) -> None:
        """Returns when all ranks have ended."""
        with answering(PAUSE, self._pause):
            try:
                while self._go_on():
                    time.sleep(LOOK_EVERY_S)
            except JobEnds:  # they may wait for ranks that are gone, and notice it by themselves or never
                self._end_within(LAST_WORDS_S)
            except BaseException:  # of the program that is told of the steps: its ranks do not outlive the call
                self.ranks.send(signal.SIGTERM)
                self._end_within(STOP_S)
                raise

    def _pause(self, number: int, frame: FrameType | None) -> None:
        """Answers Ctrl-Z, which reaches this process alone: the ranks pause with it, and go on with it."""
        self.ranks.send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.ranks.send(signal.SIGCONT)

    def _go_on(self) -> bool:
        """Does what is due; returns whether ranks are running."""
        now = time.monotonic()
        failed = self.ranks.look()
        if not self.ranks.running:
            return False
        for number in self.asked[self._passed_on :]:
            self._pass_on(number)
        if failed:
            codes = [self.ranks.codes[rank] for rank in failed]
            others_say_more = WITNESS_S if any(code != LOST_PEER for code in codes) else LAST_WORDS_S
            self._end_by = min(self._end_by, now if min(codes) < 0 else now + others_say_more)
        if now >= self._end_by:
            self._kill()
            return True
        self.attend()
        if not failed:
            self._judge(now)
        self._hurry(now)
        return True

    def _pass_on(self, number: int) -> None:
        self._passed_on += 1
        if number == signal.SIGINT and self.asked[: self._passed_on].count(signal.SIGINT) > 1:
            self.impatience = "Ctrl-C a second time"
            self._end_by = time.monotonic()
            return
        self.ranks.send(INTERRUPT if number == signal.SIGINT else number)

    def _judge(self, now: float) -> None:
        """Ends the rank that holds the others up."""
        signs = self.watch.look(with_calls=False)
        if suspect(signs, self.patience, is_whole=self.is_whole) is None:
            return
        if now - self._looked_at_stacks < STACKS_AGAIN_S:  # they have shown that it waits for others
            return
        self._looked_at_stacks = now
        stacks = self.watch.stacks()
        # Once more: the signal may have woken one that slept in a call of the system.
        signs = [replace(sign, stack=main_stack(stacks.get(sign.rank, ""))) for sign in self.watch.look()]
        if (found := suspect(signs, self.patience, is_whole=self.is_whole)) is None:
            return
        for rank, text in stacks.items():
            with suppress(OSError):
                (self.run.crash / f"rank{rank}.stack").write_text(text, encoding="utf-8")
        self.suspicion = found
        self._end_by = now

    def _hurry(self, now: float) -> None:
        """Ends ranks that were asked to stop and do not get to the end of their step."""
        if not self.asked and not self.run.stop_request.exists():
            return
        pulses = [self.watch.pulse(rank) for rank in self.ranks.running]
        if any(pulse.phase not in ("starting", "proving", "set-up", "training") for pulse in pulses):
            self._stop_by = float("inf")  # evaluating and saving take the time that they take
            return
        within = max(STOP_S, STOP_STEPS * max(pulse.longest_s for pulse in pulses))
        if self._stop_by == float("inf"):
            self._stop_by = now + within
        elif now >= self._stop_by:
            self.impatience = f"the step had not ended {within:.0f} s later"
            self._end_by = now

    def _end_within(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.ranks.look() is not None and self.ranks.running and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S / 2)
        self._kill()

    def _kill(self) -> None:
        """Ends all ranks that are left, and waits for that, within bounds."""
        self.ranks.send(signal.SIGKILL)
        deadline = time.monotonic() + KILL_S
        while self.ranks.look() is not None and self.ranks.running:
            if time.monotonic() > deadline:
                stuck = ", ".join(f"{rank} (process {self.ranks.pids[rank]})" for rank in self.ranks.running)
                say_error(f"ranks    {stuck} cannot be ended: the system holds them, often in a driver")
                for rank in self.ranks.running:
                    self.ranks.codes[rank], self.ranks.ended_at[rank] = -signal.SIGKILL, time.time()
            time.sleep(0.02)
