"""Shows where the steps of a run went, as text for `watch`: the pipeline as it ran, and a bar for any layout. No torch
here.

Invariant: a pipeline is only drawn from a step whose events are complete: on every rank the actions of the plan's list,
in its order. The ranks of one machine share a clock, so their events stand beside each other as they are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.run.clock import KINDS
from shardwise.run.rundir import RunDir
from shardwise.spec.actions import NAMES, Action
from shardwise.spec.plan import Coordinates, Plan
from shardwise.spec.schedules import schedule_actions
from shardwise.spec.timeline import Timed, Timeline, draw

SIGNS = {
    "compute": ("█", "compute"),
    "comm_exposed": ("▒", "waiting for ranks"),
    "bubble": (".", "waiting for stages"),
    "optimizer": ("▓", "optimizer"),
    "data_wait": ("░", "data"),
    "other": (" ", "other"),
}
TAIL_BYTES = 4 * 2**20  # read at the end of each event file: the newest step is there
RECENT = 50  # newest steps that are summed up


class MeasuredPipeline(NamedTuple):
    """The newest sampled step of a pipeline."""

    step: int
    timeline: Timeline
    predicted: float | None  # predicted share of the ranks' time that is idle, 0 to 1

    def summary(self) -> dict[str, Any]:
        """Returns the values for `watch --json`: seconds, and idle shares from 0 to 1."""
        idle = self.timeline.bubble_fraction
        return {"step": self.step, "seconds": self.timeline.total, "idle": idle, "predicted": self.predicted}

    def text(self, width: int) -> str:
        beside = "" if self.predicted is None else f" (predicted {100 * self.predicted:.0f} %)"
        idle = f"idle {100 * self.timeline.bubble_fraction:.0f} %{beside}"
        return (
            f"pipeline step {self.step} as it ran: {1e3 * self.timeline.total:.0f} ms, {idle}\n"
            f"{draw(self.timeline, width)}"
        )


def seconds_by_kind(steps: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the summed seconds of the last steps, by part."""
    keys = [*(f"{kind}_s" for kind in (*KINDS, "other")), "step_s"]
    return {key: sum(line[key] for line in steps[-RECENT:]) for key in keys}


def bar(where: dict[str, float], width: int = 40) -> str:
    """Returns the parts of a step as stretches of one line, and their names."""
    total = max(where["step_s"], 1e-12)
    shares = {kind: where[f"{kind}_s"] / total for kind in SIGNS}
    line, done = "", 0.0
    for kind, share in shares.items():
        done += share
        line += SIGNS[kind][0] * (round(done * width) - len(line))
    names = [
        f"{SIGNS[kind][0]} {SIGNS[kind][1]} {100 * share:.0f} %" for kind, share in shares.items() if share >= 0.005
    ]
    return f"|{line}|  {', '.join(name.strip() for name in names)}"


def measured_pipeline(run: RunDir) -> MeasuredPipeline | None:
    """Returns the newest step of the first replica and tensor slice; None where there is no pipeline, or no step of it
    in the events."""
    values = run.read_plan()
    if values.get("pp", 1) < 2:
        return None
    plan = Plan.from_dict(values)
    table = schedule_actions(plan.schedule, plan.pp, plan.virtual_stages, plan.num_microbatches)
    ranks = [plan.rank_at(Coordinates(pp, 0, 0, 0, 0)) for pp in range(plan.pp)]
    found = [_actions(run.events / f"rank{rank}.jsonl") for rank in ranks]
    for step in sorted(set.intersection(*map(set, found)), reverse=True):
        timed = [steps[step][-len(actions) :] for steps, actions in zip(found, table, strict=True)]
        if all([t.action for t in mine] == list(actions) for mine, actions in zip(timed, table, strict=True)):
            first = min(mine[0].start for mine in timed)
            moved = (tuple(Timed(t.action, t.start - first, t.end - first) for t in mine) for mine in timed)
            return MeasuredPipeline(step, Timeline(tuple(moved)), _predicted(values))
    return None


def _predicted(plan: dict[str, Any]) -> float | None:
    """Returns the predicted share of idle time, 0 to 1; None where no bubble was predicted."""
    step = (plan.get("prediction") or {}).get("step", {})
    if "bubble" not in step:
        return None
    return float(step["bubble"] / (step["bubble"] + step["compute"]))


def _actions(file: Path) -> dict[int, list[Timed]]:
    """Returns the pipeline actions of each step that the end of an event file has."""
    kinds, found = {name: kind for kind, name in NAMES.items()}, dict[int, list[Timed]]()
    for line in _last_lines(file):
        try:
            event = json.loads(line)
            if event.get("kind") == "memory":
                continue
            action = Action(kinds[event["name"]], event["stage"], event["microbatch"])
            timed = Timed(action, event["t"], event["t"] + event["dur_us"] / 1e6)
            found.setdefault(event["step"], []).append(timed)
        except (ValueError, KeyError, TypeError):  # not an action; or cut short, at either end of what was read
            continue
    return found


def _last_lines(path: Path) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            return file.read().splitlines()
    except FileNotFoundError:
        return []
