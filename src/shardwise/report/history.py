"""Sums up the steps of this process, for the closing lines. No torch here."""

from __future__ import annotations

from typing import Any

from shardwise.run.clock import KINDS


class History:
    """The steps so far: losses, seconds and tokens. The first step warms up and its time does not count."""

    def __init__(self) -> None:
        self.parts = dict.fromkeys([*(f"{kind}_s" for kind in (*KINDS, "other")), "step_s"], 0.0)
        self.losses: dict[int, float] = {}
        self.step_seconds: list[float] = []
        self.tokens = 0

    def add(self, line: dict[str, Any], is_timed: bool = True) -> None:
        """Adds a step. `line` is the one of metrics.jsonl; `is_timed` says that nothing was measured in the step that
        takes time itself."""
        self.losses[line["step"]] = line["loss"]
        if len(self.losses) == 1 or not is_timed:
            return
        self.step_seconds.append(line["step_s"])
        self.tokens += line["tokens"]
        for key in self.parts:
            self.parts[key] += line[key]

    def forget_after(self, step: int) -> None:
        """Drops the losses of steps that are made anew; the time that they took was taken."""
        self.losses = {number: loss for number, loss in self.losses.items() if number <= step}

    def median_step_s(self) -> float | None:
        """Returns the median step in seconds; None for a run of a single step, or one that was complete when it was
        resumed."""
        return sorted(self.step_seconds)[len(self.step_seconds) // 2] if self.step_seconds else None
