"""Looks at ranks from outside: their heartbeats, and what the system says of their processes.

Seconds are counted only where a rank could have computed: time in which it was ready and had no core does not count,
nor time in which this process did not look (a laptop that slept, a launcher that was stopped). Invariant: looking
changes nothing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shardwise.launch.judge import Sign
from shardwise.run.heartbeat import STACK_SIGNAL, Heartbeats, Pulse

LONGEST_LOOK_S = 1.0  # between two looks: more is time in which this process did not run
STACK_S = 1.0  # for ranks to write their stacks
CPU_SHARE = 0.02  # of the time: who computes so much gets on, where nothing else tells


@dataclass
class _Seen:
    """What was seen of one rank at the last look, and for how long it has not changed."""

    pulse: Pulse
    at: float
    cpu_s: float = 0.0
    stopped_s: float = 0.0
    beatless_s: float = 0.0
    still_s: float = 0.0


class Watch:
    """Watches the ranks that this process has started."""

    def __init__(self, heartbeats: Heartbeats, pids: Mapping[int, int]):
        """`pids` are processes by rank, in the order of their records."""
        self.heartbeats, self.pids = heartbeats, pids
        self._places = {rank: place for place, rank in enumerate(pids)}
        self._seen: dict[int, _Seen] = {}

    def look(self, *, with_calls: bool = True) -> list[Sign]:
        """Returns a sign of every rank, on demand with its collectives."""
        return [self._look(rank, pid, with_calls) for rank, pid in self.pids.items()]

    def pulse(self, rank: int) -> Pulse:
        """Returns the record of a rank; of one that has ended it is the last."""
        return self.heartbeats.read(self._places[rank])

    def _look(self, rank: int, pid: int, with_calls: bool) -> Sign:
        pulse, now = self.heartbeats.read(self._places[rank], with_calls=with_calls), time.monotonic()
        state, cpu_s = _state(pid)
        seen = self._seen.setdefault(rank, _Seen(pulse, now, cpu_s))
        elapsed, computed = min(now - seen.at, LONGEST_LOOK_S), cpu_s - seen.cpu_s
        could = min(elapsed, computed) if state == "R" else elapsed
        seen.stopped_s = seen.stopped_s + could if state == "T" else 0.0
        seen.beatless_s = seen.beatless_s + could if pulse.beat == seen.pulse.beat else 0.0
        moved = pulse.marks != seen.pulse.marks
        if pulse.phase != "training":  # nothing is marked there, but who computes gets on
            moved = moved or computed >= CPU_SHARE * elapsed > 0
        seen.still_s = 0.0 if moved or state == "t" else seen.still_s + could  # t: somebody debugs it
        seen.pulse, seen.at, seen.cpu_s = pulse, now, cpu_s
        return Sign(rank, pulse, state, seen.stopped_s, seen.beatless_s, seen.still_s)

    def stacks(self) -> dict[int, str]:
        """Returns the stacks of all ranks that can write them now. One that is stopped cannot."""
        asked = {}
        for rank, pid in self.pids.items():
            if self.pulse(rank).is_ready and _state(pid)[0] not in ("T", "t", "Z", ""):
                asked[rank] = len(self._stack(rank))
                with suppress(ProcessLookupError):
                    os.kill(pid, STACK_SIGNAL)
        deadline = time.monotonic() + STACK_S
        while time.monotonic() < deadline and not all(self._is_whole(rank, before) for rank, before in asked.items()):
            time.sleep(0.02)
        return {rank: self._stack(rank)[before:] for rank, before in asked.items()}

    def _stack(self, rank: int) -> str:
        return self.heartbeats.stacks(self._places[rank])

    def _is_whole(self, rank: int, before: int) -> bool:
        return self._stack(rank)[before:].endswith(("in <module>\n", "  ...\n"))


def main_stack(text: str) -> str:
    """Returns the main thread's part of the stacks of a process, innermost frame first: it comes last."""
    parts = text.split("\n\n")
    return parts[-1] if parts else ""


def _state(pid: int) -> tuple[str, float]:
    """Returns the letter of a process's state and the seconds it has computed; no letter where nothing says so."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return "", 0.0


def name_of(number: int) -> str:
    """Returns the name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
