"""Writes the driver of a job for Ray: a few lines of Python that `ray job submit` runs on the cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shardwise.errors import UserError
from shardwise.launch.spec import LaunchSpec

MOST_RESTARTS = 5


def script(spec: LaunchSpec, origin: str) -> str:
    """Returns the text of the driver. `origin` is the command line that it was made by."""
    if len(spec.parts) > 1:
        raise UserError(
            f"{len(spec.parts)} config files are several jobs", why="a driver runs one", fix="launch them one by one"
        )
    lines = [
        f"# Written by `{origin}`.",
        f"# {spec.predicted}",
        f"# Ray has no time limit; it will take about so long: {spec.why['time']}",
        "",
        "from shardwise.launch.schedulers.ray_driver import main",
        "",
        "JOB = {",
    ]
    for name, value, why in _settings(spec):
        lines += [f"    # {why}", f"    {json.dumps(name)}: {json.dumps(value)},"]
    return "\n".join([*lines, "}", "", 'if __name__ == "__main__":', "    raise SystemExit(main(JOB))"]) + "\n"


def _settings(spec: LaunchSpec) -> Iterator[tuple[str, Any, str]]:
    """Yields what the driver is told, each with its reason."""
    yield "nodes", spec.nodes, f"one actor on each, on machines of their own: {spec.why['nodes']}"
    yield "cpus", spec.cpus_per_node, spec.why["cpus"]
    yield "gpus", spec.gpus_per_node, spec.why["gpus"]
    yield "restarts", 0 if spec.is_check else MOST_RESTARTS, "attempts after nodes that were lost; Ray has no requeue"
    yield "command", list(spec.command(spec.parts[0])), "the one line of every node, at the start and after a restart"
    yield "environment", list(spec.environment), "variables of Ray's processes that ranks see"
