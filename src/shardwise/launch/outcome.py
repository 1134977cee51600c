"""Knows how ranks ended, and whose failure it was.

One failure makes others: ranks lose a peer, or are ended by us. Invariant: the rank that is named is the one that
failed by itself or held the others up, as far as codes, times and signs of life tell; a signal that we have sent is
never a cause. Read next: verdict.py, which says it to a person.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit
from shardwise.launch.judge import Sign, Suspicion, other_collective, where
from shardwise.launch.processes import said
from shardwise.launch.signs import name_of
from shardwise.run.guards import INTERRUPT, LOST_PEER, stop_signals

if TYPE_CHECKING:
    from shardwise.launch.supervisor import Supervisor

AT_ONCE = (*(-number for number in (*stop_signals(), INTERRUPT)), int(Exit.INTERRUPTED), int(Exit.STOPPED))
"""Exit codes of a rank that was told to stop and had nothing to commit: by the signal, or at the second Ctrl-C."""

MOST_TEXT = 4000  # characters of what a rank has printed that travel to another node

CRASHES = tuple(getattr(signal, name, 0) for name in ("SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"))


@dataclass(frozen=True)
class Failure:
    """A rank that ended with an error."""

    rank: int
    code: int  # a signal's is negative
    at: float  # seconds since 1970
    text: str = ""  # what it has said; nothing of the first rank, which says it on the terminal
    by_us: bool = False  # whether it was ended from here
    doing: str = ""  # what it was at
    waits: bool = False  # whether it waited for others


@dataclass(frozen=True)
class RanksEnded:
    """How the ranks of one node, or of all, ended."""

    signals: tuple[int, ...] = ()  # that came to their agent and were passed on to them
    failures: tuple[Failure, ...] = field(default=())
    suspicion: Suspicion | None = None  # who held the others up, and was ended for it
    impatience: str = ""  # why ranks that were asked to stop were ended
    memory_kills: int = 0  # processes that the system has killed for memory meanwhile
    has_begun: bool = False  # whether a step had begun
    host: str = field(default_factory=socket.gethostname)

    @classmethod
    def of(cls, supervisor: Supervisor, memory_kills: int) -> RanksEnded:
        """Returns how the ranks of this process's node ended."""
        ranks, watch = supervisor.ranks, supervisor.watch
        pulses = {rank: watch.pulse(rank) for rank in ranks.pids}
        failures = [
            Failure(
                rank,
                code,
                ranks.ended_at[rank],
                said(ranks.files[rank], MOST_TEXT) if rank else "",
                by_us=-code in ranks.sent[rank] and -code == signal.SIGKILL,
                doing=where(pulses[rank]),
                waits=pulses[rank].waits,
            )
            for rank, code in ranks.codes.items()
            if code
        ]
        has_begun = any(pulse.steps for pulse in pulses.values())
        found = supervisor.suspicion
        if found is None and failures and all(one.code == LOST_PEER or one.by_us for one in failures):
            found = other_collective([Sign(rank, pulse) for rank, pulse in pulses.items()])
        return cls(tuple(supervisor.asked), tuple(failures), found, supervisor.impatience, memory_kills, has_begun)

    @classmethod
    def from_dict(cls, words: Mapping[str, Any]) -> RanksEnded:
        """Returns what another node has sent as the dict of its own."""
        found = words.get("suspicion")
        known = {name: words[name] for name in ("impatience", "memory_kills", "has_begun", "host") if name in words}
        return cls(
            tuple(words["signals"]),
            tuple(Failure(**failure) for failure in words["failures"]),
            Suspicion(**found) if found else None,
            **known,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns this as plain values, to be sent."""
        return asdict(self)

    @property
    def stopped_at_once(self) -> bool:
        """Whether all ranks that failed did so because they were told to stop, or were ended because they did not."""
        by_signal = all(one.code in AT_ONCE or one.by_us for one in self.failures)
        return bool(self.signals or self.impatience) and bool(self.failures) and by_signal and self.suspicion is None


@dataclass(frozen=True)
class Cause:
    """Why ranks ended: the first culprit, in words."""

    fault: str  # one word in capitals: KILLED, STOPPED, STUCK, MEMORY, ...
    rank: int
    how: str  # a clause about the rank
    doing: str  # what it was at
    why: str
    code: Exit
    outside: bool  # whether the cause lies outside of this run
    again: bool  # whether another start may help
    waiting: str = ""  # who merely waited
    host: str = ""

    @property
    def who(self) -> str:
        """The culprit in one line, with those that only waited for it."""
        link = "in" if self.doing.startswith(("step", "set-up")) else "while"
        at = f" {link} {self.doing}" if self.doing else ""
        return f"rank {self.rank} {self.how}{at}" + f"; {self.waiting}" * bool(self.waiting)


def cause_of(ended: RanksEnded) -> Cause | None:
    """Returns why ranks ended; None where the one that failed first ended by itself and has said why."""
    if (found := ended.suspicion) is not None:
        return Cause(
            FAULTS[found.fault],
            found.rank,
            found.how,
            found.at,
            WHY[found.fault],
            Exit.HARDWARE,
            outside=found.fault in ("stopped", "network"),
            again=True,
            waiting=found.waiting,
            host=ended.host,
        )
    first = culprit(ended.failures)
    if first.code == LOST_PEER:
        how, why = "lost its connection to another rank", "no rank was seen to end, or nothing came within comm.timeout"
        return Cause("NETWORK", first.rank, how, first.doing, why, Exit.HARDWARE, outside=True, again=True)
    if first.code >= 0:
        return None
    name = name_of(-first.code)
    fault, why, code, outside = "KILLED", "nobody here sent it: somebody else on this machine did", Exit.HARDWARE, True
    if first.code == -signal.SIGKILL:
        why = "it was not sent from here, and the system has killed nothing for memory: somebody else did it"
        if ended.memory_kills:
            fault, why, code = "MEMORY", "the system killed it because memory ran out", Exit.OUT_OF_MEMORY
            outside = False
    elif -first.code in CRASHES:
        fault, outside = "CRASH", False
        why = "compiled code crashed: a library, a driver, or memory that is broken"
        if first.waits and first.code == -signal.SIGABRT:
            fault, why = "MISMATCH", "the library of collectives gave up: ranks called different ones, or other sizes"
    others = [one.rank for one in ended.failures if one.rank != first.rank]
    waiting = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others[:8]))} only lost it" if others else ""
    how = f"was killed by {name}"
    return Cause(fault, first.rank, how, first.doing, why, code, outside, again=True, waiting=waiting, host=ended.host)


FAULTS = {
    "stopped": "STOPPED",
    "interpreter held": "STUCK",
    "stuck": "STUCK",
    "another collective": "MISMATCH",
    "network": "NETWORK",
}
WHY = {
    "stopped": "somebody stopped its process, and nobody continued it; it was ended, so that the others need not wait",
    "interpreter held": "a call into compiled code never came back; its stack is in crash/",
    "stuck": "its main thread is at one place; its stack is in crash/",
    "another collective": "ranks must call the same collectives in the same order; stacks are in crash/",
    "network": "a message between ranks did not arrive, or one of them was of another collective; stacks are in crash/",
}


def culprit(failures: Sequence[Failure]) -> Failure:
    """Returns the failure that explains the others: a rank that was killed by somebody else; else the one with the most
    telling code."""
    own = [one for one in failures if not one.by_us] or list(failures)
    killed = [one for one in own if one.code < 0]
    first = min(killed or own, key=lambda one: one.at)
    return first if killed else min(own, key=_least_telling_last)


def _least_telling_last(failure: Failure) -> tuple[bool, float]:
    """Returns a sort key by which a rank that lost a peer comes after others: it only says that another one failed."""
    return failure.code == LOST_PEER, failure.at


def together(own: RanksEnded, others: Iterable[tuple[RanksEnded, bool]], was_ended: bool) -> RanksEnded:
    """Returns how the ranks of all nodes ended. Where ranks failed by themselves, those that were ended because of them
    have no say: `was_ended`, and the second of each pair."""
    found = [(own, was_ended), *others]
    first = [one for one, ended in found if not ended and one.failures] or [one for one, _ in found]
    suspect = next((one for one in first if one.suspicion), first[0])
    return RanksEnded(
        tuple(number for one, _ in found for number in one.signals),
        tuple(failure for one in first for failure in one.failures),
        suspect.suspicion,
        next((one.impatience for one, _ in found if one.impatience), ""),
        sum(one.memory_kills for one in first),
        any(one.has_begun for one, _ in found),
        suspect.host if suspect.suspicion else next((one.host for one in first if one.failures), own.host),
    )
