"""A layout with what is predicted of it, how candidates compare, and how much work finding them was. No torch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from shardwise.plan.layouts.effort import effort
from shardwise.plan.layouts.parts import Grid
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction
from shardwise.spec.recompute import CONSIDERED


@dataclass(frozen=True)
class Candidate:
    """A layout with what is predicted of it."""

    plan: Plan
    prediction: Prediction


@dataclass
class Counts:
    """The work of a search: its seconds, and how many layouts it considered, left out and predicted."""

    considered: int = 0
    too_large: int = 0  # in regions whose smallest member does not fit
    evaluated: int = 0  # predicted exactly
    seconds: float = 0.0

    @property
    def too_slow(self) -> int:
        """The number of layouts that cannot win a place any more, or that have a plainer twin which fits."""
        return self.considered - self.too_large - self.evaluated


def rank_of(candidate: Candidate) -> tuple[Any, ...]:
    """Returns the key that sorts candidates: seconds of a step times its effort (effort.py); of equal ones fewer GPUs
    and the plainer layout come first."""
    plan = candidate.plan
    return candidate.prediction.step_s * effort(plan), *plainness(plan)


def plainness(plan: Plan) -> tuple[Any, ...]:
    modes = {mode: place for place, mode in enumerate(CONSIDERED)}
    return (
        plan.world,
        ("none", "optimizer", "all").index(plan.offload),
        plan.activation_offload,
        modes.get(plan.recompute, len(modes)),
        plan.pp,
        plan.tp,
        plan.cp,
        plan.ep,
        plan.zero,
        -plan.replicate,
        plan.virtual_stages,
        plan.schedule,
        plan.cp_kind,
        not plan.sequence,
        -plan.micro_batch,
    )


Group = Callable[[Grid | Plan, int], Hashable]
"""From the degrees and the ZeRO stage of a layout to its group: of each group the search reports the best."""


def family(grid: Grid | Plan, zero: int) -> Hashable:
    """Returns the degrees and the ZeRO stage: layouts with the same ones are reported once, by the best of them."""
    return grid.dp, grid.tp, grid.cp, grid.pp, grid.ep, zero


def number_of_gpus(grid: Grid | Plan, zero: int) -> Hashable:
    return grid.dp * grid.tp * grid.cp * grid.pp
