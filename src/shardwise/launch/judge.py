"""Says which rank holds the others up, from signs of all of them: a table of rules without processes or clocks.

A rank that waits for others is never blamed while another one does not wait. Where all wait, they have called different
collectives, or the network lost something: then each is compared with its own step before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.run.heartbeat import Pulse

QUICK_S = 6.0  # without a sign of life, where steps are short
STOPPED_S = 1.0
STEPS = 10.0  # of the longest length so far, where steps are long
KNOWN_STEPS = 3  # before them nobody knows how long a step takes
COMPILING_S = 120.0  # a shape that was not seen before
PATIENCE = 0.9  # of comm.timeout: whoever waits in a collective gives up after it
WAITS_IN = ("/torch/distributed/", "/torch/cuda/", "/parallel/pipeline/send_receive.py")
"""Parts of paths: where the main thread's innermost frame is in one of these files, it waits for others or a device."""


@dataclass(frozen=True)
class Sign:
    """What is known of one rank from outside and from its heartbeat."""

    rank: int
    pulse: Pulse
    state: str = "S"  # the letter of its process in /proc; empty where there is none
    stopped_s: float = 0.0  # seconds in state T
    beatless_s: float = 0.0  # seconds without a beat in which it could have computed
    still_s: float = 0.0  # seconds in which its main thread came nowhere else, and could have
    stack: str = ""  # of its main thread, innermost frame first; empty: not asked or no answer

    @property
    def waits(self) -> bool:
        """Whether it waits for others, by its own word or by its stack."""
        innermost = next((line for line in self.stack.splitlines() if "File " in line), "")
        return self.pulse.waits or any(part in innermost for part in WAITS_IN)


@dataclass(frozen=True)
class Patience:
    """How long a rank may be silent."""

    timeout_s: float = 300.0  # comm.timeout
    compiles: bool = False

    @classmethod
    def of(cls, plan: Mapping[str, Any]) -> Patience:
        """Returns the patience with a run, from its plan.json; the usual one where there is none."""
        return cls(float(plan.get("timeout", cls.timeout_s)), plan.get("compile", "none") != "none")

    def quick_s(self, signs: Sequence[Sign]) -> float:
        """Returns the seconds that a step in which nothing moves is waited for."""
        longest = max((sign.pulse.longest_s for sign in signs), default=0.0)
        return min(max(COMPILING_S if self.compiles else QUICK_S, STEPS * longest), self.slow_s)

    @property
    def slow_s(self) -> float:
        """The seconds for whatever has no usual length: set-up, evaluation, saving, waiting for data, reporting."""
        return PATIENCE * self.timeout_s


@dataclass(frozen=True)
class Suspicion:
    """Who holds the others up, and how we know."""

    rank: int
    fault: str  # stopped, interpreter held, stuck, another collective, network
    how: str  # a clause about the rank: `is stopped (SIGSTOP)`
    at: str  # what it was at, in words
    waiting: str = ""  # who merely waited for it, and where


def suspect(signs: Sequence[Sign], patience: Patience, *, is_whole: bool) -> Suspicion | None:
    """Returns the rank that holds the others up, None where all is well. `is_whole`: these are all ranks of the job."""
    quick, slow = patience.quick_s(signs), patience.slow_s

    def limit(sign: Sign) -> float:
        is_known = sign.pulse.phase == "training" and sign.pulse.steps > KNOWN_STEPS
        return quick if is_known and sign.pulse.kind not in ("", "data_wait") else slow

    for sign in signs:
        if sign.stopped_s >= STOPPED_S:
            return _suspicion(sign, "stopped", "is stopped (SIGSTOP, or a debugger)", signs)
    for sign in signs:
        in_step = sign.pulse.phase == "training" and sign.pulse.steps > KNOWN_STEPS
        if sign.pulse.is_ready and sign.beatless_s >= (quick if in_step else slow):
            held = "holds its interpreter in one call" if sign.state else "gives no sign of life"
            how = f"{held} for {sign.beatless_s:.0f} s"
            return _suspicion(sign, "interpreter held", how, signs)
    # Where torch itself waits, as DDP's buckets in backward, nothing says so: who waits has come further.
    busy = [sign for sign in signs if sign.pulse.is_ready and not sign.waits]
    last = min(busy, key=lambda one: (one.pulse.step, one.pulse.moves, -one.still_s), default=None)
    if last is not None and last.still_s >= limit(last):
        how = "sleeps" if last.state in ("S", "D") else "does not get on"
        return _suspicion(last, "stuck", f"{how} for {last.still_s:.0f} s", signs)
    if is_whole and len(signs) > 1 and all(sign.waits and sign.still_s >= limit(sign) for sign in signs):
        return _all_wait(signs)
    return None


def other_collective(signs: Sequence[Sign]) -> Suspicion | None:
    """Returns the rank whose collectives of this step differ from those of its own step before, None where all are the
    same."""
    for sign in signs:
        now, before = sign.pulse.this_step, sign.pulse.last_step
        at = next((i for i, name in enumerate(now) if i >= len(before) or name != before[i]), None)
        if before and at is not None:
            expected = before[at] if at < len(before) else "none"
            how = f"called {now[at]} where its step before called {expected} (collective {at + 1} of the step)"
            return _suspicion(sign, "another collective", how, signs)
    return None


def _all_wait(signs: Sequence[Sign]) -> Suspicion:
    """Returns the rank that called another collective than in its step before, or than the others."""
    if (found := other_collective(signs)) is not None:
        return found
    furthest = max(sign.pulse.calls for sign in signs)
    behind = [sign for sign in signs if sign.pulse.calls < furthest]
    doing = {sign.pulse.doing for sign in signs}
    if len(doing) > 1 or behind:
        counts: dict[str, int] = {}
        for sign in signs:
            counts[sign.pulse.doing] = counts.get(sign.pulse.doing, 0) + 1
        odd = min(signs, key=lambda one: (counts[one.pulse.doing], -one.pulse.calls))
        return _suspicion(odd, "another collective", f"waits in {odd.pulse.doing}, the others do not", signs)
    how = "waits, like all others, for a collective that never ends,"
    return _suspicion(signs[0], "network", how, signs)


def _suspicion(sign: Sign, fault: str, how: str, signs: Sequence[Sign]) -> Suspicion:
    ahead = (sign.pulse.step, sign.pulse.moves)
    others = [
        other
        for other in signs
        if other.rank != sign.rank and (other.waits or (other.pulse.step, other.pulse.moves) > ahead)
    ]
    return Suspicion(sign.rank, fault, how, where(sign.pulse), waiting(others))


def where(pulse: Pulse) -> str:
    """Returns what a rank is at, in words: `step 12, forward`."""
    if pulse.phase == "training" and pulse.steps:
        return f"step {pulse.step}, {pulse.doing or 'between two spans'}"
    return pulse.phase


def waiting(signs: Sequence[Sign]) -> str:
    """Returns who merely waited, and where: `ranks 0 and 2 only waited for it (all-reduce over dp, collective 27)`."""
    if not signs:
        return ""
    names = [str(sign.rank) for sign in signs]
    listed = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
    if len(names) > 8:
        listed = f"{', '.join(names[:6])} and {len(names) - 6} more"
    pulse = signs[0].pulse
    call = f" ({pulse.doing}, collective {pulse.calls:,})" if pulse.waits and pulse.doing else ""
    return f"rank{'s' if len(names) > 1 else ''} {listed} only waited for it{call}"
