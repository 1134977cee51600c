"""Asks SLURM what its partitions have, and compares a job with them before it is queued.

Where there is no `sinfo`, as on the laptop where a script is only written, nothing is known and nothing is refused.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from shardwise.config.units import format_seconds
from shardwise.errors import UserError
from shardwise.launch.spec import LaunchSpec

PATIENCE_S = 20.0
FORMAT = "%P|%D|%l|%G"  # partition (the default has a star), nodes, time limit, generic resources


@dataclass(frozen=True)
class Partition:
    """What a partition has."""

    name: str
    nodes: int
    seconds: int | None  # the longest job; None: no limit
    gpus: int | None  # most of a node; None: not known
    is_default: bool


def partitions(environ: Mapping[str, str]) -> list[Partition]:
    """Returns the partitions of the cluster whose commands are here; none where SLURM does not answer."""
    command = shutil.which("sinfo", path=environ.get("PATH"))
    if command is None:
        return []
    try:
        done = subprocess.run(
            [command, "--noheader", "--format", FORMAT],
            capture_output=True, text=True, timeout=PATIENCE_S, env=dict(environ),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    found: dict[str, Partition] = {}
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split("|")]
        if len(words) != 4 or not words[1].isdecimal():
            continue
        name = words[0].rstrip("*")
        gpus = sum(int(count) for count in re.findall(r"\bgpu(?::[^:,()]+)?:(\d+)", words[3]))
        other = found.get(name)  # nodes of another kind have a line of their own
        nodes, most = (other.nodes, other.gpus or 0) if other else (0, 0)
        found[name] = Partition(name, nodes + int(words[1]), _seconds(words[2]), max(gpus, most), "*" in words[0])
    return [one if one.nodes else _hidden(one, environ) for one in found.values()]


def _hidden(partition: Partition, environ: Mapping[str, str]) -> Partition:
    """Returns a partition whose nodes sinfo does not show, as it does with a cloud's while they are off; how many there
    are stands in the configuration."""
    command = shutil.which("scontrol", path=environ.get("PATH"))
    if command is None:
        return partition
    asked = [command, "--oneliner", "show", "partition", partition.name]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=PATIENCE_S, env=dict(environ))
    except (OSError, subprocess.TimeoutExpired):
        return partition
    declared = re.search(r"\bTotalNodes=(\d+)", done.stdout)
    return replace(partition, nodes=int(declared[1]), gpus=None) if declared else partition


def fitted(spec: LaunchSpec, name: str | None, asked_time: bool, environ: Mapping[str, str]) -> LaunchSpec:
    """Returns the job as a partition can run it, or refuses it: a time that nobody asked for is cut to the partition's,
    and the job goes on after a requeue."""
    known = partitions(environ)
    found = next((one for one in known if (one.name == name if name else one.is_default)), None)
    if known and name and found is None:
        near = get_close_matches(name, [one.name for one in known], n=1)
        raise UserError(
            f"this cluster has no partition `{name}`",
            why=f"it has {', '.join(one.name for one in known)}",
            fix=f"--partition {near[0]}" if near else f"--partition {known[0].name}",
        )
    if found is None:
        return spec
    others = [one for one in known if one.nodes >= spec.nodes and (one.gpus or 0) >= spec.gpus_per_node]
    another = f"--partition {others[0].name}" if others else ""
    if spec.nodes > found.nodes:
        raise UserError(
            f"the plan takes {spec.nodes} nodes, and partition {found.name} has {found.nodes}",
            why=spec.why["nodes"],
            fix=another or f"plan for {found.nodes} nodes: `shardwise plan MODEL --cluster {found.nodes}x...`",
        )
    if found.gpus is not None and spec.gpus_per_node > found.gpus:
        raise UserError(
            f"the plan has {spec.gpus_per_node} GPUs to a node, and nodes of partition {found.name} have {found.gpus}",
            why=spec.why["gpus"],
            fix=another or f"plan for nodes of {found.gpus}",
        )
    if found.seconds is None or spec.seconds <= found.seconds:
        return spec
    limit = format_seconds(found.seconds)
    if asked_time or found.seconds < spec.grace_s + (spec.step_s or 0.0):
        raise UserError(
            f"{format_seconds(spec.seconds)} is longer than partition {found.name} lets a job run",
            why=f"its limit is {limit}",
            fix=f"--time {found.seconds // 60}m: what is left goes on after a requeue",
        )
    why = f"the limit of partition {found.name}; the rest goes on after requeues: {spec.why['time']}"
    return replace(spec, seconds=found.seconds, why={**spec.why, "time": why})


def _seconds(text: str) -> int | None:
    """Returns the seconds of a limit as sinfo writes it, `1-00:00:00`; None for `infinite`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
