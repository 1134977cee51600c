"""Says how ranks ended, in the words of one exit code: whose failure it was, and what the person does next.

One failure makes others: ranks lose a peer, or are ended by us. Invariant: the rank that is named is the one that
failed by itself, as far as codes and times tell.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.errors import Exit
from shardwise.run.guards import INTERRUPT, stop_signals
from shardwise.run.rundir import RunDir
from shardwise.terminal import say, say_error

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import RunProcsResult

AT_ONCE = (*(-number for number in (*stop_signals(), INTERRUPT)), int(Exit.INTERRUPTED), int(Exit.STOPPED))
"""Exit codes of a rank that was told to stop and had nothing to commit: by the signal, or at the second Ctrl-C."""

MOST_TEXT = 4000  # characters of what a rank has printed that travel to another node


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an error."""

    rank: int
    code: int  # a signal's is negative
    at: float  # seconds since 1970
    text: str = ""  # what it has said; nothing of the first rank, which says it on the terminal


@dataclass(frozen=True)
class RanksEnded:
    """How the ranks of one node, or of all, ended."""

    signals: tuple[int, ...] = ()  # that came to their agent and were passed on to them
    failures: tuple[Failure, ...] = field(default=())

    @classmethod
    def of(cls, signals: Sequence[int], result: RunProcsResult, first: int) -> RanksEnded:
        """Returns how the ranks of this process's node ended. `first`: the rank of the first of them."""
        failures = [
            Failure(first + local, failure.exitcode, failure.timestamp, _said(result.stderrs.get(local, "")))
            for local, failure in result.failures.items()
        ]
        return cls(tuple(signals), tuple(failures))

    @property
    def stopped_at_once(self) -> bool:
        """Whether all ranks that failed did so because they were told to stop."""
        return bool(self.signals and self.failures) and all(one.code in AT_ONCE for one in self.failures)


def _said(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8", errors="replace").strip()[-MOST_TEXT:] if file else ""
    except OSError:
        return ""


def culprit(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that explains the others: a rank that was killed; else the one with the most telling code."""
    killed = [one for one in failures if one.code < 0]
    first = min(killed or failures, key=lambda one: one.at)
    if first.code == -signal.SIGTERM or not killed:  # SIGTERM is ours, sent to the survivors: who really failed?
        first = min(failures, key=_least_telling_last)
    return first


def _least_telling_last(failure: Failure) -> tuple[bool, bool, float]:
    """Returns a sort key by which a rank that lost a peer comes after others: it only says that another one failed."""
    return failure.code < 0, failure.code == Exit.HARDWARE, failure.at


def exit_code(run: RunDir, ended: RanksEnded) -> int:
    """Reports how the ranks ended, where they have not said so themselves, and returns the exit code of the whole."""
    if ended.stopped_at_once:
        return _stopped_at_once(run, ended.signals[0])
    event = run.last_event() or {}
    if not ended.failures:
        return int(event.get("exit", Exit.DONE))
    first = culprit(ended.failures)
    if first.code >= 0:
        if any(one.rank == 0 and one.code == first.code for one in ended.failures):
            return first.code  # the first rank has said the same on the terminal
        say_error(first.text)
        if event.get("exit") != first.code:  # the first rank was ended, or has seen only that this one was gone
            why = first.text.splitlines()[0] if first.text else f"rank {first.rank} failed"
            run.append({"event": "failed", "exit": first.code, "why": why, "wall_time": time.time()})
        return first.code
    name = signal.Signals(-first.code).name
    say_error(f"error: rank {first.rank} was killed by {name}")
    hint = (
        "the system kills processes when it runs out of memory; train.micro_batch=1 needs less"
        if name == "SIGKILL"
        else f"details in {run.log}"
    )
    say_error(f"  why  {hint}")
    say_error(f"  fix  {run.how_to_resume()}")
    why = f"rank {first.rank} killed by {name}"
    run.append({"event": "failed", "exit": int(Exit.HARDWARE), "why": why, "wall_time": time.time()})
    return int(Exit.HARDWARE)


def _stopped_at_once(run: RunDir, number: int) -> int:
    """Reports ranks that had nothing to commit yet, or were told twice to stop; returns the exit code."""
    code = Exit.INTERRUPTED if number == signal.SIGINT else Exit.STOPPED
    why = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
    say(f"STOPPED  at once, by {why}; the last checkpoint, if any, is kept            exit {int(code)}, resumable")
    say(f"  do     {run.how_to_resume()}")
    run.append({"event": "stopped", "exit": int(code), "why": why, "wall_time": time.time()})
    return int(code)
