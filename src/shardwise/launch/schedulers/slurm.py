"""Reads where a process stands that srun started: a node with one task per node, a rank with more.

SLURM sets many of its variables in the batch shell as well, where nothing was started on the other nodes yet: only a
step of srun says where a process stands. The head's address is SHARDWISE_HEAD, which a generated script exports once
for all nodes; without it NodeAddr is asked from `scontrol`, which containers often lack, then the node's name is tried.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping

from shardwise.errors import UserError
from shardwise.launch.head_address import reachable_heads
from shardwise.launch.place import (
    THIS_MACHINE,
    NodePlace,
    RankPlace,
    port_of_job,
    secret_of_job,
    whole_number,
)
from shardwise.launch.schedulers.hostlist import expand

SPECIAL_STEPS = 0xFFFF_FFF0  # from here on steps are the batch shell, salloc's shell and the like
PATIENCE_S = 10.0  # for an answer of scontrol, whose controller may be busy


def nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the nodes of this job, none outside of SLURM."""
    listed = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST", "")
    return expand(listed) if listed else ()


def detect(environ: Mapping[str, str]) -> NodePlace | RankPlace | None:
    """Returns the place of a task of srun; a batch shell and an allocation without srun are none."""
    step = environ.get("SLURM_STEP_ID", "")
    if "SLURM_JOB_ID" not in environ or "SLURM_PROCID" not in environ or not step.isdecimal():
        return None
    if int(step) >= SPECIAL_STEPS:
        return None
    job, names = environ["SLURM_JOB_ID"], nodes(environ)
    tasks = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", ""))
    if len(tasks) != len(names):
        raise UserError(
            f"SLURM names {len(names)} nodes and tasks for {len(tasks)}",
            why="SLURM_STEP_NODELIST and SLURM_STEP_TASKS_PER_NODE do not belong together",
            fix="start with srun, and leave SLURM's variables as it sets them",
        )
    index = whole_number(environ, "SLURM_NODEID")
    if index >= len(names):
        raise UserError(
            f"SLURM_NODEID is {index}, and the step has {len(names)} nodes",
            why="nodes count from 0",
            fix="start with srun, and leave SLURM's variables as it sets them",
        )
    heads = (THIS_MACHINE,) if len(names) == 1 else reachable_heads(_candidates(environ, names), index == 0, names[1:])
    port = port_of_job(environ, job)
    if max(tasks) > 1:
        rank, local_rank = whole_number(environ, "SLURM_PROCID"), whole_number(environ, "SLURM_LOCALID")
        return RankPlace("slurm", job, rank, sum(tasks), local_rank, tasks[index], heads[0], port)
    end = whole_number(environ, "SLURM_JOB_END_TIME", 0)
    return NodePlace(
        scheduler="slurm",
        job=job,
        index=index,
        count=len(names),
        heads=heads,
        port=port,
        attempt=whole_number(environ, "SLURM_RESTART_COUNT", 0),
        ends_at=float(end) if end else None,
        secret_file=secret_of_job(environ),
        name=names[index],
    )


def _tasks_per_node(text: str) -> list[int]:
    """Returns the number of tasks on each node of what SLURM writes as `2(x3),1`."""
    tasks: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise UserError(
                f"SLURM_STEP_TASKS_PER_NODE is `{text}`",
                why="numbers of tasks are expected, as in 2(x3),1",
                fix="start with srun, and leave SLURM's variables as it sets them",
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def _candidates(environ: Mapping[str, str], names: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yields where an address of the head may be found, best first. srun's own address is the head's only when srun ran
    in the batch shell on the step's first node, so it comes last."""
    given = [word.strip() for word in environ.get("SHARDWISE_HEAD", "").split(",") if word.strip()]
    yield from (("SHARDWISE_HEAD", word) for word in given)
    if not given:  # thousands of nodes that all ask the controller at once are a burden
        yield "NodeAddr of scontrol", node_address(environ, names[0]) or ""
    yield "the node's name", names[0]
    if address := environ.get("SLURM_LAUNCH_NODE_IPADDR"):
        yield "SLURM_LAUNCH_NODE_IPADDR", address


def node_address(environ: Mapping[str, str], name: str) -> str | None:
    """Returns the address that SLURM's configuration has for a node, or None where scontrol cannot say."""
    command = shutil.which("scontrol", path=environ.get("PATH"))
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, "--oneliner", "show", "node", name],
            capture_output=True, text=True, timeout=PATIENCE_S, env=dict(environ),
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"\bNodeAddr=(\S+)", done.stdout)
    return match[1] if match and done.returncode == 0 else None
