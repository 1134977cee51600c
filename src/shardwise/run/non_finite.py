"""Finds steps that are not finite: what `run.on_nan` is about.

A step's loss and gradient norm are the same on every rank, so all of them find the same. With `rollback` the update is
made and undone by going back, and no step waits for anything; with `skip` the update waits for the norm, and is left
out on all ranks or on none (step.py). Invariant: fp16 overflows are the loss scale's to answer, not ours.
"""

from __future__ import annotations

import math

from shardwise.run.going_back import Trouble
from shardwise.run.step import StepResult

MOST_SKIPPED = 3
"""Updates in a row that are left out before the weights themselves are doubted."""


class NonFinite:
    """Watches the steps of a run, in order."""

    def __init__(self, on_nan: str):
        self.patience = MOST_SKIPPED if on_nan == "skip" else 1
        self.in_a_row: list[int] = []

    def look(self, step: int, result: StepResult) -> Trouble | None:
        """Returns the trouble that a step's result shows; None where it is finite, or was passed over and may be a
        single one."""
        if is_finite(result):
            self.in_a_row = []
            return None
        self.in_a_row.append(step)
        if len(self.in_a_row) < self.patience:
            return None
        steps, self.in_a_row = tuple(self.in_a_row), []
        what = "the loss" if not math.isfinite(result.loss) else "the gradient norm"
        times = f" in {len(steps)} steps in a row" if len(steps) > 1 else ""
        return Trouble(step, f"{what} is not a number{times}", steps[0] - 1, steps)


def is_finite(result: StepResult) -> bool:
    """Returns whether the loss and the gradient norm are finite: a norm that is not would have made every weight of the
    update one that is not."""
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)
