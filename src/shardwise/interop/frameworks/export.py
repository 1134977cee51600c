"""Writes plans for other frameworks: Megatron-LM's flags, torchtitan's TOML, DeepSpeed's JSON, accelerate's YAML. No
torch.

Each has its own file with what it cannot run, what it refuses and how it is written. Invariant: what is written starts
there, and trains this model; nothing of the plan is left out silently. Read next: framework.py.
"""

from __future__ import annotations

import difflib

from shardwise.errors import UserError
from shardwise.interop.frameworks.accelerate import ACCELERATE
from shardwise.interop.frameworks.deepspeed import DEEPSPEED
from shardwise.interop.frameworks.framework import Exported, Framework, UpdateRule
from shardwise.interop.frameworks.megatron import MEGATRON
from shardwise.interop.frameworks.torchtitan import TORCHTITAN
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan

FRAMEWORKS: dict[str, Framework] = {one.name: one for one in (MEGATRON, TORCHTITAN, DEEPSPEED, ACCELERATE)}

TIMES = "predicted times and memory are of our runtime, not of this framework"


def export_as(
    name: str, spec: ModelSpec, job: Job, plan: Plan, per_node: int, rule: UpdateRule | None = None
) -> Exported:
    """Returns the plan as a framework reads it; refuses a model or a layout that it does not run."""
    framework = framework_named(name, spec, job)
    if lacks := framework.runs_in(spec, plan):
        raise UserError(
            f"{framework.title} does not run {plan.layout}",
            why=f"it has {'; '.join(lacks)}",
            fix=f"shardwise plan ... --as {name} searches among the layouts that it runs",
        )
    made = framework.write(spec, job, plan, per_node, rule or UpdateRule())
    return Exported(made.text, made.kind, (*made.missing, TIMES))


def framework_named(name: str, spec: ModelSpec, job: Job) -> Framework:
    """Returns a framework that trains this model; refuses where it would be another one."""
    check_framework(name)
    framework = FRAMEWORKS[name]
    if reasons := framework.refuses(spec, job):
        others = [other for other in FRAMEWORKS.values() if not other.refuses(spec, job)]
        raise UserError(
            f"{framework.title} would not train {spec.name} as it is",
            why=f"it has {'; '.join(reasons)}",
            fix=" or ".join(f"--as {other.name}" for other in others),
        )
    return framework


def check_framework(name: str) -> None:
    """Refuses a name that no framework here has, and suggests the nearest one."""
    if name in FRAMEWORKS:
        return
    close = difflib.get_close_matches(name.lower(), FRAMEWORKS, n=1, cutoff=0.4)
    raise UserError(
        f"unknown framework `--as {name}`",
        why=f"a row can be printed for: {', '.join(FRAMEWORKS)}",
        fix=f"--as {close[0]}" if close else f"--as {next(iter(FRAMEWORKS))}",
    )
