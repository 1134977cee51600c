"""Writes plan.json: the plan of a run, what was predicted for it and, after its first steps, what was measured."""

from __future__ import annotations

import json
from typing import Any

from shardwise.files import write_atomically
from shardwise.run.rundir import RunDir
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction


def write_plan(run: RunDir, plan: Plan, prediction: Prediction, measured: dict[str, Any] | None = None) -> None:
    """Writes plan.json. `measured` is the comparison after the first steps, when there is one."""
    values = {**plan.to_dict(), "prediction": prediction.to_dict(), **({"measured": measured} if measured else {})}
    write_atomically(run.plan, json.dumps(values, indent=1) + "\n")
