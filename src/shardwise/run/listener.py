"""Declares what is reported of a run while it goes on, to the reporter (report/reporter.py) or to a callback of the
user.

The loop calls these between steps, in this order, on every rank. A listener that does not override a method hears
nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit
from shardwise.run.clock import Lap

if TYPE_CHECKING:
    from shardwise.memory.points import Point
    from shardwise.run.bubble_filling import FilledBubbles
    from shardwise.run.going_back import Trouble, WayBack
    from shardwise.run.measured_steps import MeasuredSteps
    from shardwise.run.replica_check import Repair
    from shardwise.run.setup import Setup
    from shardwise.run.step import StepResult


@dataclass(frozen=True)
class FinishedStep:
    """A step whose results have been read."""

    step: int
    result: StepResult
    lap: Lap
    parts: dict[str, float]  # seconds by kind, as Lap.parts gives them
    lr: float
    num_targets: int  # target tokens over all ranks
    is_timed: bool  # whether its time counts: nothing was measured in it that takes time itself
    memory_curve: list[Point]  # of the step whose memory was recorded, else empty
    filled_s: float | None  # seconds of idle slots that were used; None: the run fills none
    side_eval: dict[str, Any] | None  # a pass over held-out batches that this step's idle slots completed
    measured: MeasuredSteps | None  # after the first few steps: what they took, on every rank


@dataclass(frozen=True)
class Ending:
    """How a run ended on all ranks, for its summary."""

    step: int  # the last one that was finished
    code: Exit  # DONE, or why it stopped
    why: str  # the reason of a stop, or why a run that diverged did not go back, in words
    overflow: str  # what does not fit into fp16, where that is the reason; else empty
    peak_bytes: int  # of the fullest rank
    measured: MeasuredSteps | None  # what the first steps took
    is_new: bool  # no step came with `measured`, because there were too few


class Listener:
    """Does nothing at any of these moments; subclasses override those that they want to hear of."""

    def say(self, line: str) -> None:
        """Shows one line to a person."""

    def started(self, setup: Setup) -> None:
        """Is called when everything is in place for the first step."""

    def step_started(self, step: int) -> None:
        """Is called when a step has been computed, or on a GPU queued."""

    def step(self, finished: FinishedStep) -> None:
        """Is called with a step's results: in order, once for each step, on a GPU after the next one has been
        queued."""

    def found(self, repairs: Sequence[Repair], spikes: Sequence[Trouble]) -> None:
        """Is called after every step with what was repaired of this model's replicas, and with spikes that the run goes
        on after: mostly nothing."""

    def went_back(self, way: WayBack) -> None:
        """Is called when the run has gone back to an earlier step, from which it goes on."""

    def evaluated(self, step: int, loss: float | None, own: Mapping[str, float]) -> None:
        """Is called with the held-out loss in nats, None where nothing is held out; and with what the program's own
        evaluation found."""

    def sampled(self, text: str | None) -> None:
        """Is called with a continuation by the model; None on ranks that have none to show."""

    def saved(self, step: int) -> None:
        """Is called when a checkpoint of this step is committed, or on other ranks handed in."""

    def filled(self, step: int, found: FilledBubbles | None) -> None:
        """Is called at the end of a run that fills its pipeline's idle slots; None where nothing is held out."""

    def stopped(self, ending: Ending) -> None:
        """Is called when the run ends before its last step."""

    def finished(self, ending: Ending) -> None:
        """Is called when the run has made all its steps."""
