"""Who hears of a run while it goes on: the reporter (report/reporter.py), or a callback of the user.

The loop calls these between steps, in this order, on every rank. A listener that does not override a method hears
nothing of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit
from shardwise.run.clock import Lap

if TYPE_CHECKING:
    from shardwise.memory.points import Point
    from shardwise.run.bubble_filling import Filled
    from shardwise.run.measured_steps import MeasuredSteps
    from shardwise.run.setup import Setup
    from shardwise.run.step import StepResult


@dataclass(frozen=True)
class FinishedStep:
    """A step whose results are here."""

    step: int
    result: StepResult
    lap: Lap
    parts: dict[str, float]  # seconds by kind, as Lap.parts gives them
    lr: float
    num_targets: int  # target tokens over all ranks
    is_timed: bool  # nothing looked at it that takes time
    memory_curve: list[Point]  # of the step whose memory was recorded, else empty
    filled_s: float | None  # seconds of idle slots that were used; None: the run fills none
    side_eval: dict[str, Any] | None  # a pass over held-out batches that this step's idle slots completed
    measured: MeasuredSteps | None  # after the first few steps: what they took, on every rank


@dataclass(frozen=True)
class Ending:
    """How a run ended on all ranks, for its summary."""

    step: int  # the last one that was finished
    code: Exit  # DONE, or why it stopped
    why: str  # of a stop, in words
    overflow: str  # what does not fit into fp16, where that is the reason
    peak_bytes: int  # of the fullest rank
    measured: MeasuredSteps | None  # what the first steps took
    is_new: bool  # `measured` was not with any step, because there were too few


class Listener:
    def say(self, line: str) -> None:
        """One line for a person."""

    def started(self, setup: Setup) -> None:
        """Everything is in place for the first step."""

    def step_started(self, step: int) -> None:
        """A step has been computed, or on a GPU queued."""

    def step(self, finished: FinishedStep) -> None:
        """A step's results are here: in order, each step once, on a GPU after the next one has been queued."""

    def evaluated(self, step: int, loss: float | None) -> None:
        """The held-out loss in nats; None where nothing is held out."""

    def sampled(self, text: str | None) -> None:
        """A continuation by the model; None on ranks that have none to show."""

    def saved(self, step: int) -> None:
        """A checkpoint of this step is committed, or on other ranks handed in."""

    def filled(self, step: int, found: Filled | None) -> None:
        """At the end of a run that fills its pipeline's idle slots; None where nothing is held out."""

    def stopped(self, ending: Ending) -> None:
        """The run ends before its last step."""

    def finished(self, ending: Ending) -> None:
        """The run has made all its steps."""
