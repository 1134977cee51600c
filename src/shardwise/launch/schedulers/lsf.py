"""Reads where a process stands that LSF's blaunch started, one per host."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.errors import UserError
from shardwise.launch.head_address import reachable_heads
from shardwise.launch.place import NodePlace, port_of_job, secret_of_job, whole_number


def nodes(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the hosts of this job, none outside of LSF. LSB_MCPU_HOSTS has a number of slots after each name."""
    words = environ.get("LSB_MCPU_HOSTS", "").split()[::2] or environ.get("LSB_HOSTS", "").split()
    return tuple(dict.fromkeys(words))


def detect(environ: Mapping[str, str]) -> NodePlace | None:
    """Returns the place of a task of blaunch, whose number counts from 1; the job's own shell is none."""
    if "LSB_JOBID" not in environ or "LSF_PM_TASKID" not in environ:
        return None
    names = nodes(environ)
    index, count = whole_number(environ, "LSF_PM_TASKID") - 1, len(names)
    if not 0 <= index < count:
        raise UserError(
            f"this is task {index + 1} of blaunch, and the job has {count} hosts",
            why="one task per host starts the ranks of its host",
            fix='blaunch -z "$(sort -u $LSB_DJOB_HOSTFILE)" shardwise train ...',
        )
    job = environ["LSB_JOBID"]
    candidates = [("SHARDWISE_HEAD", environ["SHARDWISE_HEAD"])] if environ.get("SHARDWISE_HEAD") else []
    return NodePlace(
        scheduler="lsf",
        job=job,
        index=index,
        count=count,
        heads=reachable_heads([*candidates, ("the job's first host", names[0])], index == 0, names[1:]),
        port=port_of_job(environ, job),
        attempt=int(environ.get("LSB_RESTART") == "Y"),
        secret_file=secret_of_job(environ),
    )
