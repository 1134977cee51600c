"""The agent of a node, which `shardwise train` and `resume` are where a scheduler starts them once per node. The agents
of a job find each other, agree, start their ranks, end together.

    every node     the job's secret, its own address, hello to the head
    head           compares the hellos, plans, makes or finds the run directory, tells the others (leader.py)
    other nodes    see the run directory, or make a mirror of it; their ranks come to the head's store by a tunnel
                   (member.py)
    every node     starts its ranks; what they end with goes to the head, which says the exit code of all

Invariant: every process of a job ends with the same code, and none outlives the others by more than half a minute.
"""

from __future__ import annotations

import os
import resource
import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType

from shardwise.launch.nodes.job import NodeJob
from shardwise.launch.nodes.leader import Leader
from shardwise.launch.nodes.member import Member
from shardwise.launch.nodes.secret import read_secret, shared_secret
from shardwise.run.guards import answering

MOST_FILES = 2**16
NOTICE = signal.SIGUSR1


def work_on_node(job: NodeJob) -> int:
    """Does this node's part of a job and returns the exit code, which is the same on all nodes."""
    place = job.place
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's store warns of every address without a name
    with ExitStack() as opened:
        _open_as_many_files_as_allowed()
        opened.enter_context(answering([NOTICE], _as_sigterm))
        if place.secret_file:
            secret = read_secret(Path(place.secret_file))
            return Leader(job, secret).work() if place.index == 0 else Member(job, secret).work()
        # With the port in its name it is that of one job: who has started two by hand on one head gave them two ports.
        file = job.runs / f".secret-{place.scheduler}-{place.job}-{place.port}-{place.attempt}"
        if place.index > 0:
            newer = partial(shared_secret, file, is_head=False)
            return Member(job, newer(), newer).work()

        def write() -> bytes:
            opened.callback(file.unlink, missing_ok=True)  # not sooner: nodes that come late read it, too
            return shared_secret(file, is_head=True)

        return Leader(job, write).work()


def _as_sigterm(number: int, frame: FrameType | None) -> None:
    """Answers the notice before a time limit, which `sbatch --signal=USR1@60` sends to tasks, as whoever is at work
    answers SIGTERM: the ranks' supervisor, or the command, which ends."""
    signal.raise_signal(signal.SIGTERM)


def _open_as_many_files_as_allowed() -> None:
    """Raises this process's limit of open files: every rank's way to the store takes three on the head, and a login
    has 1024."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    most = MOST_FILES if allowed == resource.RLIM_INFINITY else min(allowed, MOST_FILES)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, allowed))
