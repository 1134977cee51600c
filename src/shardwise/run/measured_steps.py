"""Collects what a run's first steps took on every rank, to be set beside what was predicted
(report/predicted_and_measured.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from shardwise.run.agreement import from_all
from shardwise.run.clock import KINDS
from shardwise.run.memory_watch import MemoryWatch
from shardwise.spec.plan import Plan

CHECK_AFTER = 20  # steps until prediction and measurement are compared; a shorter run compares at its end

PARTS = (*(f"{kind}_s" for kind in (*KINDS, "other")), "step_s")
"""Keys of a step's seconds: by kind, and `step_s` for all of it."""


@dataclass(frozen=True)
class MeasuredSteps:
    """What the first steps took, on every rank."""

    num_steps: int
    times: list[dict[str, float]]  # a usual step of each rank, by PARTS; empty: too few steps
    memory: list[list[int]] | None  # bytes of each rank in the order of memory_watch.MEASURED; None: nobody looked


class FirstSteps:
    """The times of the steps that are compared with the prediction. The first one warms up and does not count."""

    def __init__(self) -> None:
        self.num_steps, self.parts = 0, list[dict[str, float]]()

    def add(self, parts: Mapping[str, float], is_timed: bool) -> None:
        self.num_steps += 1
        if self.num_steps > 1 and is_timed and len(self.parts) < CHECK_AFTER:
            self.parts.append({part: parts[part] for part in PARTS})

    def gather(self, memory: MemoryWatch, device: torch.device, plan: Plan) -> MeasuredSteps:
        """Collective. Returns what the steps so far took on every rank."""
        held = from_all(memory.measured(), device, plan) if memory.steps else None
        ranks = []
        if self.parts:  # the same on all ranks
            mine = typical(self.parts)
            found = from_all([round(1e9 * seconds) for seconds in mine.values()], device, plan)
            ranks = [dict(zip(mine, (value / 1e9 for value in values), strict=True)) for values in found]
        return MeasuredSteps(len(self.parts), ranks, held)


def typical(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the seconds by kind of a usual step: the mean over the middle half by length. So the kinds still add up
    to the step, and a step in which the machine did something else does not count."""
    ordered = sorted(steps, key=lambda parts: parts["step_s"])
    middle = ordered[len(ordered) // 4 : len(ordered) - len(ordered) // 4]
    return {part: sum(parts[part] for parts in middle) / len(middle) for part in PARTS}
