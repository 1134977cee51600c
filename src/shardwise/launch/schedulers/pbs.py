"""Reads where a process stands that PBS's pbsdsh started, one per host."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from shardwise.errors import UserError
from shardwise.launch.head_address import reachable_heads
from shardwise.launch.place import NodePlace, port_of_job, secret_of_job

SHELL = "1"  # the job's own shell is its first task


def nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the hosts of this job, none outside of PBS; the node file has a host once for every slot."""
    try:
        lines = Path(environ["PBS_NODEFILE"]).read_text(encoding="utf-8").split()
    except (KeyError, OSError):
        return ()
    return tuple(dict.fromkeys(lines))


def detect(environ: Mapping[str, str]) -> NodePlace | None:
    """Returns the place of a task of pbsdsh: of its host among those of the node file."""
    if "PBS_JOBID" not in environ or environ.get("PBS_TASKNUM", SHELL) == SHELL:
        return None
    names = nodes(environ)
    own = socket.gethostname().split(".")[0]
    index = next((at for at, name in enumerate(names) if name.split(".")[0] == own), None)
    if index is None:
        raise UserError(
            f"this host, {own}, is not in the node file of the job",
            why=f"PBS_NODEFILE {environ.get('PBS_NODEFILE', 'is not set and')} names {', '.join(names) or 'no host'}",
            fix="start the tasks with `pbsdsh -u`, or set SHARDWISE_NODE, SHARDWISE_NODES and SHARDWISE_HEAD",
        )
    job = environ["PBS_JOBID"]
    candidates = [("SHARDWISE_HEAD", environ["SHARDWISE_HEAD"])] if environ.get("SHARDWISE_HEAD") else []
    return NodePlace(
        scheduler="pbs",
        job=job,
        index=index,
        count=len(names),
        heads=reachable_heads([*candidates, ("the job's first host", names[0])], index == 0, names[1:]),
        port=port_of_job(environ, job),
        secret_file=secret_of_job(environ),
    )
