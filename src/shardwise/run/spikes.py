"""Finds loss spikes: several steps in a row whose loss or gradient norm is far above what it was (`run.on_spike`).

Robust: far is measured from the median of the last steps, in units of their median deviation, so neither a single odd
batch nor a loss that falls or wanders is one. The first steps of a run, or of a process, only fill the window. What a
spike is blamed on are the batches of its steps and the one before it, whose update the first of them is the first to
show. Invariant: every rank has the same numbers, so all of them find the same spike.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median

from shardwise.run.going_back import Trouble
from shardwise.run.step import StepResult

WINDOW = 64  # steps that say what is usual
LEAST = 32  # of them, before anything is far above
IN_A_ROW = 3
DEVIATIONS = 10.0
OF_NORMAL = 1.4826  # a normal distribution's standard deviation, in median deviations
LOSS_SHARE, NORM_SHARE = 0.1, 4.0
"""How far above its median a value is at least that counts, as a share of it: a loss that hardly moves has deviations
that mean nothing, and gradient norms grow by themselves while a run warms up."""


@dataclass(frozen=True)
class _Usual:
    """A step within the window."""

    step: int
    loss: float
    norm: float


class Spikes:
    """Watches the steps of a run, in order."""

    def __init__(self) -> None:
        self._window: deque[_Usual] = deque(maxlen=WINDOW)
        self._high: list[_Usual] = []

    def look(self, step: int, result: StepResult) -> Trouble | None:
        """Returns the spike that a step's result completes, None where there is none. Only finite results are looked
        at: the others are non_finite.py's."""
        found = _Usual(step, result.loss, result.grad_norm)
        losses, norms = [one.loss for one in self._window], [one.norm for one in self._window]
        is_high = len(losses) >= LEAST and (
            found.loss > _limit(losses, LOSS_SHARE) or found.norm > _limit(norms, NORM_SHARE)
        )
        if not is_high:
            self._window.extend([*self._high, found])  # one or two high steps were none
            self._high = []
            return None
        self._high.append(found)
        if len(self._high) < IN_A_ROW:
            return None
        first, last = self._high[0].step, self._high[-1].step
        peak, usual = max(one.loss for one in self._high), median(losses)
        why = f"a loss spike, {peak:.3f} where {usual:.3f} was usual"
        if peak <= _limit(losses, LOSS_SHARE):
            peak, usual = max(one.norm for one in self._high), median(norms)
            why = f"a spike of the gradient norm, {peak:.3g} where {usual:.3g} was usual"
        return Trouble(last, f"{why}, from step {first} on", first - 2, tuple(range(first - 1, last + 1)))

    def goes_on(self) -> None:
        """Takes what came after a spike for the usual: looks at nothing until the window is filled again."""
        self._window.clear()
        self._high = []

    def went_back(self, step: int) -> None:
        """Forgets the steps behind one that the run has gone back to."""
        self._window = deque((one for one in self._window if one.step <= step), maxlen=WINDOW)
        self._high = []


def _limit(values: list[float], share: float) -> float:
    middle = median(values)
    deviation = median(abs(value - middle) for value in values)
    return middle + max(DEVIATIONS * OF_NORMAL * deviation, share * abs(middle))
