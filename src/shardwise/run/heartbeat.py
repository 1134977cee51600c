"""Tells the launcher, through shared memory, that a rank lives and what it is at.

Every rank has one record. Its main thread notes where it is: the phase, the step, the span of the clock that is open,
and which collectives it has begun. A thread adds a beat four times a second; a process that is stopped, or whose
interpreter is held by one call, has none. The launcher reads the records and judges (launch/signs.py, launch/judge.py).

The memory has no name in any file system, so nothing is left of it, whoever is killed. Invariant: each number of a
record has one writer, and writing one costs less than a microsecond.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.run.clock import Span

BEAT_EVERY_S = 0.25
STACK_SIGNAL: int = getattr(signal, "SIGUSR2", 0)
"""Has a rank write the stacks of all its threads, even while one call holds the interpreter."""

PHASES = ("starting", "proving", "set-up", "training", "evaluating", "sampling", "saving", "going back", "ending")
TRAINING, SAVING = PHASES.index("training"), PHASES.index("saving")
KINDS = ("", "data_wait", "compute", "comm_exposed", "bubble", "optimizer", "other")
"""Kinds of spans (clock.py); no span is open at the first."""

READY, BEAT, PHASE, STEP, MARKS, SPAN, KIND, CALLS, STEP_CALLS, LAST_CALLS, LONGEST, STEPS, STEP_MARKS = range(13)
"""Places in a record. READY: whether it answers STACK_SIGNAL. MARKS: how often the main thread has come somewhere
else. SPAN, KIND: what is open. CALLS: collectives begun; STEP_CALLS and LAST_CALLS: as they were when this step and the
one before began. LONGEST: nanoseconds of the longest step but the first two. STEPS: begun by this process. STEP_MARKS:
MARKS as it was when this step began."""

FIRST_NAME, NUM_NAMES, NAME_BYTES = 16, 63, 48
FIRST_CALL, NUM_CALLS = FIRST_NAME + NUM_NAMES * NAME_BYTES // 8, 1024
CELLS = FIRST_CALL + NUM_CALLS
UNTIMED_STEPS = 2  # they compile, and take memory


class Heartbeat:
    """The record of this rank, which only it writes."""

    def __init__(self, memory: mmap.mmap | None = None, place: int = 0, stacks: int | None = None):
        """`memory` has the record at `place`; None: nobody reads it. `stacks` is a descriptor for stacks."""
        self._bytes = memoryview(memory or mmap.mmap(-1, 8 * CELLS))[8 * CELLS * place : 8 * CELLS * (place + 1)]
        self.cells = self._bytes.cast("q")
        self._names: dict[tuple[str, str | None], int] = {}
        self._began = 0
        if memory is None:
            return
        if stacks is not None and STACK_SIGNAL:
            faulthandler.register(STACK_SIGNAL, open(stacks, "wb", buffering=0), all_threads=True)  # noqa: SIM115
            self.cells[READY] = 1
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self.cells[BEAT] += 1
            time.sleep(BEAT_EVERY_S)

    def enter(self, phase: str) -> None:
        """Notes that this rank has come to another phase."""
        cells = self.cells
        cells[PHASE], cells[SPAN], cells[KIND] = PHASES.index(phase), 0, 0
        cells[MARKS] += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Notes that this rank is in a phase, which lies between steps."""
        self.enter(phase)
        yield
        self.enter("training")

    def step(self, step: int) -> None:
        """Notes that a step begins, and how long the one before it took."""
        cells, now = self.cells, time.monotonic_ns()
        if cells[STEPS] > UNTIMED_STEPS and cells[STEP] == step - 1:
            cells[LONGEST] = max(cells[LONGEST], now - self._began)
        self._began = now
        cells[LAST_CALLS], cells[STEP_CALLS] = cells[STEP_CALLS], cells[CALLS]
        cells[STEP] = step
        cells[STEPS] += 1
        if cells[PHASE] != TRAINING:
            self.enter("training")
        cells[MARKS] += 1
        cells[STEP_MARKS] = cells[MARKS]

    # What the clock calls -----------------------------------------------------------------------------------------

    def opened(self, span: Span) -> None:
        """Notes the span that is open now."""
        cells, key = self.cells, (span.name, span.group)
        name = self._names.get(key) or self._add(key)
        kind = cells[KIND] = KIND_OF[span.kind]
        cells[SPAN] = name
        cells[MARKS] += 1
        if kind in WAITING:
            calls = cells[CALLS]
            cells[FIRST_CALL + calls % NUM_CALLS] = name
            cells[CALLS] = calls + 1

    def closed(self, parent: Span | None) -> None:
        """Notes that a span is over. `parent` is the one that is open still."""
        cells = self.cells
        if parent is None:
            cells[SPAN] = cells[KIND] = 0
        else:
            cells[SPAN], cells[KIND] = self._names[parent.name, parent.group], KIND_OF[parent.kind]
        cells[MARKS] += 1

    def _add(self, key: tuple[str, str | None]) -> int:
        number = self._names[key] = min(len(self._names) + 1, NUM_NAMES)
        name, axis = key
        text = (f"{name} over {axis}" if axis else name).encode()[: NAME_BYTES - 1]
        start = 8 * FIRST_NAME + (number - 1) * NAME_BYTES
        self._bytes[start : start + NAME_BYTES] = text.ljust(NAME_BYTES, b"\0")
        return number


KIND_OF = {kind: number for number, kind in enumerate(KINDS)}
WAITING = (KIND_OF["comm_exposed"], KIND_OF["bubble"])
"""Kinds of spans in which a rank waits for others."""


@dataclass(frozen=True)
class Pulse:
    """What a record said when it was read."""

    is_ready: bool = False
    beat: int = 0
    phase: str = "starting"
    step: int = 0
    steps: int = 0  # begun by this process
    marks: int = 0
    moves: int = 0  # marks of the step it is at: how far it has come
    doing: str = ""  # the span that is open
    kind: str = ""
    calls: int = 0  # collectives begun
    this_step: tuple[str, ...] = ()  # collectives of the step it is at, in order
    last_step: tuple[str, ...] = ()  # and of the one before
    longest_s: float = 0.0  # the longest step but the first two

    @property
    def waits(self) -> bool:
        """Whether the rank has said that it waits for others."""
        return bool(self.kind) and KIND_OF[self.kind] in WAITING


class Heartbeats:
    """The records of the ranks that this process starts. Used as a context: at its end the memory is given back."""

    def __init__(self, count: int):
        self.count = count
        self._file = _nameless()
        self._file.truncate(8 * CELLS * count)
        self._memory = mmap.mmap(self._file.fileno(), 8 * CELLS * count)
        self._bytes = memoryview(self._memory)
        self._stacks = [_nameless() for _ in range(count)]

    def __enter__(self) -> Heartbeats:
        return self

    def __exit__(self, *error: object) -> None:
        self._bytes.release()
        self._memory.close()
        for file in (self._file, *self._stacks):
            file.close()

    @property
    def descriptors(self) -> list[int]:
        """The descriptors that ranks must inherit."""
        return [file.fileno() for file in (self._file, *self._stacks)]

    def variable(self, place: int) -> str:
        """Returns what the rank of this place finds its record by: HEARTBEAT in its environment."""
        return f"{self._file.fileno()} {self.count} {place} {self._stacks[place].fileno()}"

    def read(self, place: int, *, with_calls: bool = True) -> Pulse:
        """Returns what the rank of this place has written, on demand with its collectives: they may be a thousand."""
        with self._bytes[8 * CELLS * place : 8 * CELLS * (place + 1)] as part, part.cast("q") as cells:
            calls, first, before = cells[CALLS], cells[STEP_CALLS], cells[LAST_CALLS]
            return Pulse(
                is_ready=bool(cells[READY]),
                beat=cells[BEAT],
                phase=PHASES[cells[PHASE] % len(PHASES)],
                step=cells[STEP],
                steps=cells[STEPS],
                marks=cells[MARKS],
                moves=cells[MARKS] - cells[STEP_MARKS],
                doing=_name(part, cells[SPAN]),
                kind=KINDS[cells[KIND] % len(KINDS)],
                calls=calls,
                this_step=_calls(part, cells, first, calls) if with_calls else (),
                last_step=_calls(part, cells, before, first) if with_calls and calls - before <= NUM_CALLS else (),
                longest_s=cells[LONGEST] / 1e9,
            )

    def stacks(self, place: int) -> str:
        """Returns the stacks that the rank of this place has written so far."""
        number = self._stacks[place].fileno()
        return os.pread(number, os.fstat(number).st_size, 0).decode("utf-8", "replace")


def heartbeat_of(variable: str | None) -> Heartbeat:
    """Returns the heartbeat of this process: by the variable that its launcher has set, else one that nobody reads."""
    if variable is None:
        return Heartbeat()
    number, count, place, stacks = map(int, variable.split())
    return Heartbeat(mmap.mmap(number, 8 * CELLS * count), place, stacks)


def _nameless() -> IO[bytes]:
    """Returns a file in memory that has no name, or a temporary one where the system has none."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create("shardwise"), "r+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _name(part: memoryview, number: int) -> str:
    if not 0 < number <= NUM_NAMES:
        return ""
    start = 8 * FIRST_NAME + (number - 1) * NAME_BYTES
    return bytes(part[start : start + NAME_BYTES]).rstrip(b"\0").decode("utf-8", "replace")


def _calls(part: memoryview, cells: memoryview, first: int, end: int) -> tuple[str, ...]:
    numbers = [cells[FIRST_CALL + call % NUM_CALLS] for call in range(max(first, end - NUM_CALLS), end)]
    return tuple(_name(part, number) for number in numbers)
