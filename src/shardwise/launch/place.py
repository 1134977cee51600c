"""Answers which scheduler started this process, and where in its job the process stands.

A process is either one of one per node, which starts the ranks of its node itself (`NodePlace`), or one rank that was
started as such (`RankPlace`). Each scheduler's own variables are read in its file of launch/schedulers/ and nowhere
else. Invariant: a job of several nodes is never taken for one of one node; what a scheduler leaves unclear is refused.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.errors import UserError

LOWEST_PORT, NUM_PORTS = 12_000, 20_000  # below the ports that Linux gives to outgoing connections (32768 and up)
THIS_MACHINE = "127.0.0.1"


@dataclass(frozen=True)
class NodePlace:
    """Where the one process of a node stands among those of its job; it starts the ranks of its node itself."""

    scheduler: str
    job: str  # the scheduler's name of the job, the same on all nodes
    index: int  # of this node among `count`; 0 is the head
    count: int
    heads: tuple[str, ...]  # addresses of the head to try, best first; this machine's loopback only if count is 1
    port: int  # of the head
    attempt: int = 0  # how often the scheduler has started the job again
    ends_at: float | None = None  # when the scheduler ends the job, in seconds since 1970
    secret_file: str | None = None  # the file with the job's secret, which only its owner may read
    name: str = ""  # of this node, as the scheduler calls it; empty: as it calls itself


@dataclass(frozen=True)
class RankPlace:
    """Where a process that was started as one rank stands among the ranks of its job."""

    scheduler: str
    job: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    master: str  # the address where ranks meet
    port: int


def own_place(environ: Mapping[str, str]) -> NodePlace | RankPlace | None:
    """Returns where this process stands as the first scheduler says that has started it, or None if none has: a shell,
    also one inside a job. Launchers are asked before the schedulers inside whose jobs they are used."""
    from shardwise.launch.schedulers import kubernetes, lsf, mpirun, pbs, ray, slurm, ssh, torchrun

    for scheduler in (torchrun, ray, ssh, kubernetes, mpirun, slurm, lsf, pbs):
        if place := scheduler.detect(environ):
            return place
    return None


def idle_nodes(environ: Mapping[str, str]) -> str | None:
    """Returns a line about nodes that this job has and that a process which nobody started on each of them leaves idle;
    None where there are none."""
    from shardwise.launch.schedulers.slurm import nodes

    if len(names := nodes(environ)) < 2:
        return None
    return f"this job has {len(names)} nodes, only this one is used; srun --ntasks-per-node=1 in front uses all"


def whole_number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Returns the number that a variable holds, 0 or more, or `default` where the variable is not set."""
    text = environ.get(name, "").strip()
    if not text and default is not None:
        return default
    if not text.isdecimal():
        raise UserError(
            f"{name} is {f'`{text}`' if text else 'not set'}",
            why="it says where this process stands in its job, and must be a whole number",
            fix="start the job with a script of `shardwise launch`, or set the variable as the scheduler does",
        )
    return int(text)


def position(environ: Mapping[str, str], index: str, count: str) -> tuple[int, int]:
    """Returns what two variables say: the place of a process, and among how many."""
    at, of = whole_number(environ, index), whole_number(environ, count)
    if at >= of:
        raise UserError(
            f"{index} is {at}, and {count} is {of}",
            why=f"places count from 0, so the last of {of} is {of - 1}",
            fix=f"give every process a {index} of its own below {count}",
        )
    return at, of


def port_of_job(environ: Mapping[str, str], job: str) -> int:
    """Returns SHARDWISE_PORT, or a port that follows from the job's name: the same on all its nodes, and seldom that of
    another job on the same node."""
    port = whole_number(environ, "SHARDWISE_PORT", LOWEST_PORT + zlib.crc32(job.encode()) % NUM_PORTS)
    if not 0 < port < 65_536:
        raise UserError(f"SHARDWISE_PORT is {port}", why="ports are 1 to 65535", fix="choose one above 1024")
    return port


def secret_of_job(environ: Mapping[str, str]) -> str | None:
    """Returns the path of the file with the job's secret, as its script says."""
    return environ.get("SHARDWISE_SECRET_FILE") or None
