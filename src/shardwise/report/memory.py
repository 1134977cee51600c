"""Shows the memory of a run as text: predicted beside measured after it, and how it rises and falls in one step for
`watch`. No torch here.

Rows have the names that people use; each stands beside the part of the prediction that it answers. A measured row is
the most that its category ever held; they are not all full at the same moment, so the peak of all together is a row of
its own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.config.units import format_bytes
from shardwise.run.rundir import RunDir

ANSWERS = {
    "parameters": "weights",
    "buffers": "gathered",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "temporary": "allocator",
    "reserved": "process",
}
"""Row -> the part of `predict_memory` that it answers."""

ROWS = (*ANSWERS, "peak")

UNSEEN = "temporary"
"""The row that nobody can look into where a CPU's blocks are compiled: its bytes are in `reserved` then."""

SIGNS = {"parameters": "█", "optimizer": "▓", "gradients": "▒", "buffers": "░", "activations": "+", "temporary": "·"}
"""The sign of each category, from the bottom of the picture to its top."""

HEIGHT = 10
HEAD_BYTES = 4 * 2**20  # read at either end of an event file: the watched step is near one of them


# Predicted beside measured -------------------------------------------------------------------------------------------


def memory_report(predicted: dict[str, int], ranks: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Returns the memory part of a run's last line, in bytes. `ranks` has what each rank measured, in the order of
    ROWS."""
    named = [dict(zip(ROWS, sizes, strict=True)) for sizes in ranks]
    totals = [values["peak"] for values in named]
    fullest, emptiest = totals.index(max(totals)), totals.index(min(totals))
    return {
        "predicted": {row: predicted.get(part, 0) for row, part in ANSWERS.items()} | {"peak": sum(predicted.values())},
        "fullest": {"rank": fullest, **named[fullest]},
        "emptiest": {"rank": emptiest, **named[emptiest]},
        "spread": max(totals) - min(totals),
        "ranks": named if len(named) <= 16 else None,
    }


def report_lines(report: dict[str, Any]) -> list[str]:
    """Returns the table of the fullest rank, and how far the others are from it."""
    predicted, measured = report["predicted"], report["fullest"]
    lines = [f"memory   {'rank ' + str(measured['rank']) + ', at most':<22}{'predicted':>12}{'measured':>12}"]
    for row in ROWS:
        if row == UNSEEN and predicted[row] and not measured[row]:
            lines.append(f"         {row:<22}{format_bytes(predicted[row]):>12}{'not seen':>12}")
        elif predicted[row] or measured[row]:
            values = f"{format_bytes(predicted[row]):>12}{format_bytes(measured[row]):>12}"
            lines.append(f"         {row:<22}{values}  {percent_off(measured[row], predicted[row]):>7}")
    emptiest = report["emptiest"]
    if emptiest["rank"] != measured["rank"]:
        total, spread = format_bytes(emptiest["peak"]), format_bytes(report["spread"])
        lines.append(f"         emptiest: rank {emptiest['rank']} with {total}, {spread} less")
    return lines


def percent_off(measured: float, predicted: float) -> str:
    return f"{100 * (measured / predicted - 1):+.0f} %".replace("-0 %", "+0 %") if predicted else "n/a"


# Memory in the course of a step --------------------------------------------------------------------------------------


class MemoryPoint(NamedTuple):
    """What one rank held at one moment of a step, in bytes by category."""

    at_us: float
    held: dict[str, int]
    where: str

    @property
    def total(self) -> int:
        """Returns the bytes of all categories together."""
        return sum(self.held.values())


class Curve(NamedTuple):
    """How the memory of one rank rises and falls in one step."""

    rank: int
    step: int
    moments: list[MemoryPoint]

    @property
    def peak(self) -> MemoryPoint:
        return max(self.moments, key=lambda moment: moment.total)

    def summary(self) -> dict[str, Any]:
        peak = self.peak
        return {"rank": self.rank, "step": self.step, "peak_bytes": peak.total, "held": peak.held, "where": peak.where}

    def text(self, width: int) -> str:
        """Returns the curve as a stacked area: time to the right, bytes upward, one sign per category."""
        first, last, peak = self.moments[0].at_us, self.moments[-1].at_us, self.peak
        columns = self._columns(width)
        at = min(width - 1, int(width * (peak.at_us - first) / max(last - first, 1)))
        lines = [
            f"memory   rank {self.rank}, step {self.step}: at most {format_bytes(peak.total)} in tensors, in "
            f"{peak.where}"
        ]
        for row in range(HEIGHT, 0, -1):
            height = peak.total * (row - 0.5) / HEIGHT
            edge = format_bytes(peak.total) if row == HEIGHT else "0" if row == 1 else ""
            lines.append(f"{edge:>9}|{''.join(_sign(held, height) for held in columns)}")
        lines.append(f"{'':9} {' ' * at}^ peak" if at < width - 6 else f"{'':9} {' ' * (at - 5)}peak ^")
        shown = [name for name in SIGNS if any(moment.held.get(name, 0) for moment in self.moments)]
        names = ", ".join(f"{SIGNS[name]} {name} {format_bytes(peak.held.get(name, 0))}" for name in shown)
        return "\n".join([*lines, f"         at the peak: {names}"])

    def _columns(self, width: int) -> list[dict[str, int]]:
        """Returns the fullest moment of each stretch of time; a stretch without one is as the one before."""
        first, last = self.moments[0].at_us, self.moments[-1].at_us
        found: list[MemoryPoint | None] = [None] * width
        for moment in self.moments:
            column = min(width - 1, int(width * (moment.at_us - first) / max(last - first, 1)))
            best = found[column]
            if best is None or moment.total > best.total:
                found[column] = moment
        columns, held = [], self.moments[0].held
        for fullest in found:
            held = fullest.held if fullest else held
            columns.append(held)
        return columns


def _sign(held: dict[str, int], height: float) -> str:
    for name, sign in SIGNS.items():
        height -= held.get(name, 0)
        if height < 0:
            return sign
    return " "


def measured_memory(run: RunDir) -> Curve | None:
    """Returns the newest curve of the fullest rank; None where no step was watched."""
    found = [curve for path in sorted(run.events.glob("rank*.jsonl")) if (curve := _curve(path)) is not None]
    if not found:
        return None
    newest = max(curve.step for curve in found)
    return max((curve for curve in found if curve.step == newest), key=lambda curve: curve.peak.total)


def _curve(path: Path) -> Curve | None:
    steps: dict[int, list[dict[str, Any]]] = {}
    for line in _ends(path):
        if b'"memory"' not in line:
            continue
        try:
            event = json.loads(line)
            if event["kind"] == "memory":
                steps.setdefault(event["step"], []).append(event)
        except (ValueError, KeyError, TypeError):  # cut short
            continue
    if not steps:
        return None
    step = max(steps)
    events = steps[step]
    return Curve(events[0]["rank"], step, [MemoryPoint(e["start_us"], e["held"], _where(e)) for e in events])


def _where(event: dict[str, Any]) -> str:
    text = str(event["name"])
    if event.get("microbatch") is not None:
        text += f" of micro-batch {event['microbatch']}"
    return text + (f", stage {event['stage']}" if event.get("stage") else "")


def _ends(path: Path) -> list[bytes]:
    """Returns the first and the last lines of a file; all of them if it is small."""
    with open(path, "rb") as file:
        lines = file.read(HEAD_BYTES).splitlines()
        rest = file.seek(0, os.SEEK_END) - HEAD_BYTES
        if rest > 0:
            file.seek(max(HEAD_BYTES, rest))
            lines += file.read().splitlines()
    return lines
