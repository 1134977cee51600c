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
from contextlib import ExitStack
from pathlib import Path

from shardwise.launch.nodes.job import NodeJob
from shardwise.launch.nodes.leader import Leader
from shardwise.launch.nodes.member import Member
from shardwise.launch.nodes.secret import read_secret, shared_secret


def work_on_node(job: NodeJob) -> int:
    """Does this node's part of a job and returns the exit code, which is the same on all nodes."""
    place = job.place
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch's store warns of every address without a name
    with ExitStack() as opened:
        if place.secret_file:
            secret = read_secret(Path(place.secret_file))
        else:
            file = job.runs / f".secret-{place.scheduler}-{place.job}-{place.attempt}"
            secret = shared_secret(file, is_head=place.index == 0)
            opened.callback(file.unlink, missing_ok=True)
        return Leader(job, secret).work() if place.index == 0 else Member(job, secret).work()
