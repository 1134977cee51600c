"""What a node is asked to do, before anybody has planned anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cluster.describe.machine import Machine
from shardwise.run.rundir import RunDir

if TYPE_CHECKING:
    from shardwise.launch.place import NodePlace
    from shardwise.launch.start import PlannedRun

JOIN_S = 600.0  # seconds that nodes may start after each other
READY_S = 3600.0  # to fetch a checkpoint and to read the text
END_S = 60.0  # for the other nodes to say how their ranks ended


@dataclass(frozen=True)
class NodeJob:
    """The part of one node of a job."""

    place: NodePlace
    asked: str  # a digest of it, the same on all nodes
    interface: str | None  # comm.interface
    runs: Path  # run.dir
    prepare: Callable[[Machine], tuple[RunDir, PlannedRun]]
    """Returns the run directory and the run, ready to start on all nodes together; only the head calls it."""
    options: tuple[str, ...] = ()  # for ranks: --no-verify and the like
    from_step: int | None = None
    only_checks: bool = False  # look at the nodes, their devices too, and start nothing
