"""What a technique must win before it is worth its trouble. No torch.

The same run differs by 1 to 6 % from one day to the next, so a layout that is predicted to be 1 % faster is not known
to be faster. It has more parts that can break, though, and more to understand. Candidates are therefore ranked by their
step time times `effort`. Invariant: at least 1, and a layout that does all that another does, and more, has no smaller
one (best_first.py relies on it).
"""

from __future__ import annotations

from functools import cache

from shardwise.plan.layouts.parts import Grid
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import SCHEDULES

PER_CENT = {
    "offload=optimizer": 2.0,  # its link was measured on one card alone; others of the node share the CPU
    "offload=all": 3.0,
    "activation offload": 3.0,
    "context parallelism": 1.0,
    "a pipeline": 1.0,
    "several stages per rank, or a split backward": 1.0,
    "tensor parallelism": 0.5,
    "shared states": 0.5,  # ZeRO, of whatever stage
}
"""Per cent of a step that each technique must win."""

MOST_EFFORT = 1 + sum(PER_CENT.values()) / 100
"""The largest effort that a layout can have."""


def effort(plan: Plan) -> float:
    more = PER_CENT["shared states"] / 100 if plan.zero else 0.0
    return effort_of(plan, plan.offload, plan.activation_offload, plan.schedule) + more


def effort_of(grid: Plan | Grid, offload: str, activation_offload: bool, schedule: str = "1f1b") -> float:
    """Returns the least effort of all layouts with these degrees, whatever their ZeRO stage and schedule."""
    return _sum(grid.cp > 1, grid.tp > 1, grid.pp > 1, offload, activation_offload, schedule)


@cache
def _sum(cp: bool, tp: bool, pp: bool, offload: str, activation_offload: bool, schedule: str) -> float:
    used = {
        "offload=optimizer": offload == "optimizer",
        "offload=all": offload == "all",
        "activation offload": activation_offload,
        "context parallelism": cp,
        "a pipeline": pp,
        "several stages per rank, or a split backward": pp and not SCHEDULES[schedule].is_simple,
        "tensor parallelism": tp,
    }
    return 1 + sum(PER_CENT[name] for name, is_used in used.items() if is_used) / 100
