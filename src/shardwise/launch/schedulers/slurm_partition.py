"""Asks SLURM what its partitions have, and compares a job with them before it is queued.

Where there is no `sinfo`, as on the laptop where a script is only written, nothing is known and nothing is refused.
Where there is one that SLURM does not answer, no job is queued.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches

from shardwise.config.units import format_seconds
from shardwise.errors import UserError
from shardwise.launch.spec import LaunchSpec
from shardwise.terminal import say_error

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


class SlurmDoesNotAnswer(UserError):
    """Is raised where SLURM's commands are here, and its controller does not take what they ask."""


def partitions(environ: Mapping[str, str]) -> list[Partition]:
    """Returns the partitions of the cluster whose commands are here; none where there are no such commands."""
    command = shutil.which("sinfo", path=environ.get("PATH"))
    if command is None:
        return []
    try:
        done = subprocess.run(
            [command, "--noheader", "--format", FORMAT],
            capture_output=True, text=True, timeout=PATIENCE_S, env=dict(environ),
        )  # fmt: skip
    except OSError:
        return []
    except subprocess.TimeoutExpired:
        raise _no_answer(f"nothing within {PATIENCE_S:.0f} s") from None
    if "Could not establish a configuration source" in done.stderr:  # the commands of no cluster
        return []
    if done.returncode:
        raise _no_answer(done.stderr)
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


def _no_answer(said: str) -> SlurmDoesNotAnswer:
    """Returns the error for what sinfo has said. What munge refuses comes back as no bytes at all."""
    last = said.strip().rpartition("\n")[2].removeprefix("slurm_load_partitions: ")
    why, fix = f"sinfo says: {last}", "`scontrol ping` says where the controller should be and whether it is up"
    if "Munge encode failed" in said:
        why, fix = "munged, which signs what SLURM's commands ask, does not run on this host", "systemctl start munge"
    elif re.search("Zero Bytes|[Aa]uthentication|[Cc]redential", said):
        now = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        why = f"what munge signs here is good for 5 minutes by the controller's clock (here: {now}), and by its key"
        fix = "set this host's clock (chronyc makestep); if `date -u` is right: the controller's /etc/munge/munge.key"
    return SlurmDoesNotAnswer(f"SLURM refuses what this host asks: {last}", why=why, fix=fix)


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


def fitted(
    spec: LaunchSpec, name: str | None, asked_time: bool, environ: Mapping[str, str], is_submitted: bool = False
) -> LaunchSpec:
    """Returns the job as a partition can run it, or refuses it: a time that nobody asked for is cut to the partition's,
    and the job goes on after a requeue. A script that is only written does not need SLURM's answer."""
    try:
        known = partitions(environ)
    except SlurmDoesNotAnswer as problem:
        if is_submitted:
            raise
        say_error(f"slurm    {problem.what}; the job is not compared with its partition")
        return spec
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
