"""Sets predicted beside measured, part by part, once a run has made its first steps. No torch here.

A clock knows six kinds of time (run/clock.py), the planner more parts (plan/prediction/step_time.py): each part answers
to one row. Invariant: on both sides the rows add up to the step. The memory of the same comparison is memory.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shardwise.config.units import format_bytes
from shardwise.report.memory import ROWS as MEMORY_ROWS
from shardwise.report.memory import percent_off, report_lines
from shardwise.run.clock import KINDS
from shardwise.spec.prediction import Prediction
from shardwise.terminal import counted

ROWS = {
    "compute": ("in the model", ("compute", "recompute", "launch")),
    "comm_exposed": (
        "waiting for ranks",
        ("data-parallel", "tensor-parallel", "context-parallel", "expert-parallel", "straggler"),
    ),
    "bubble": ("waiting for stages", ("bubble", "pipeline")),
    "optimizer": ("optimizer", ("optimizer", "offload")),
    "data_wait": ("waiting for data", ()),
    "other": ("other", ()),
}
"""Kind of the clock -> the row's name, and the parts of the prediction that stand beside it."""

Parts = Mapping[str, float]


def compare(
    prediction: Prediction, ranks: Sequence[Parts], memory: dict[str, Any] | None, num_steps: int
) -> dict[str, Any]:
    """Returns the comparison that plan.json keeps, in seconds and bytes. `ranks` has a usual step of each rank; the
    rank that computes longest is the one that is predicted."""
    slowest = max(range(len(ranks)), key=lambda rank: ranks[rank]["compute_s"]) if ranks else None
    rows: dict[str, dict[str, float]] = {}
    if slowest is not None:
        named = {part for _, parts in ROWS.values() for part in parts}
        left = sum(seconds for part, seconds in prediction.step.items() if part not in named)
        for kind, (name, parts) in ROWS.items():
            predicted = sum(prediction.step.get(part, 0.0) for part in parts) + left * (kind == "other")
            rows[name] = {"predicted": predicted, "measured": ranks[slowest][f"{kind}_s"]}
        rows["step"] = {"predicted": prediction.step_s, "measured": ranks[slowest]["step_s"]}
    return {"steps": num_steps, "rank": slowest, "step": rows, "memory": memory}


def short_lines(found: dict[str, Any]) -> list[str]:
    """Returns the comparison for people who look on: a line of time and one of memory, each with the part that is
    furthest off. `shardwise watch` has all parts."""
    sides: dict[str, tuple[Mapping[str, Parts], str, Callable[[Any], str]]]
    sides = {"time": (found["step"], "step", _duration)}
    if memory := found["memory"]:
        held = {row: {"predicted": memory["predicted"][row], "measured": memory["fullest"][row]} for row in MEMORY_ROWS}
        sides["memory"] = held, "peak", format_bytes
    lines = []
    for label, (rows, whole, shown) in sides.items():
        parts = {name: row for name, row in rows.items() if name != whole and row["measured"]}
        if parts:
            off, worst = percent_off(rows[whole]["measured"], rows[whole]["predicted"]), _furthest(parts)
            about = f"{_beside(shown, rows[whole])} ({off}); furthest off: {worst}, {_beside(shown, rows[worst])}"
            lines.append(f"{label:<9}{about}")
    return lines


def _furthest(rows: Mapping[str, Parts]) -> str:
    return max(rows, key=lambda name: abs(rows[name]["measured"] - rows[name]["predicted"]))


def _beside(shown: Callable[[Any], str], row: Parts) -> str:
    """Returns a row of the comparison in words."""
    return f"{shown(row['measured'])}, predicted {shown(row['predicted'])}"


def comparison_lines(found: dict[str, Any]) -> list[str]:
    """Returns the comparison as lines: one table of time, one of memory."""
    lines = []
    if found["step"]:
        title = f"rank {found['rank']}, {counted(found['steps'], 'step')}"
        lines.append(f"time     {title:<22}{'predicted':>12}{'measured':>12}")
        for name, row in found["step"].items():
            if max(row.values()) >= 0.005 * found["step"]["step"]["measured"]:
                values = "".join(f"{_duration(row[side]):>12}" for side in ("predicted", "measured"))
                lines.append(f"         {name:<22}{values}  {percent_off(row['measured'], row['predicted']):>7}")
    return lines + (report_lines(found["memory"]) if found["memory"] else [])


def _duration(seconds: float) -> str:
    """Returns a duration in seconds or milliseconds, with its unit: tables of steps are about milliseconds."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"


assert set(ROWS) == {*KINDS, "other"}
