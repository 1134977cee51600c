"""Times collectives between the processes of this machine and fits a line to them: steps * alpha + bytes / rate. No
torch here.

A ring over n ranks takes n-1 steps for a gather, a scatter or an exchange and moves (n-1)/n of the bytes; an all-reduce
takes twice both. So time over steps is a line over bytes per step, one for all n. Invariant: processes started here are
gone on return. Read next: collective_rank.py.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from shardwise.cluster.describe.machine import Machine
from shardwise.cluster.measure.link import fit_line, loopback_interface, run_ranks
from shardwise.spec.cluster import ClusterSpec

SIZES = {"gloo": (4096, 65536, 2**20, 2**22, 2**24), "nccl": (4096, 2**18, 2**20, 2**22, 2**24, 2**26, 2**28)}
TIMES = {"all-reduce": 2}  # how often a ring goes round; once for the others


@dataclass(frozen=True)
class CollectiveTime:
    """What one collective took: bytes and seconds."""

    collective: str
    ranks: int
    size: int
    seconds: float

    @property
    def steps(self) -> int:
        return TIMES.get(self.collective, 1) * (self.ranks - 1)

    @property
    def moved(self) -> float:
        """The bytes that each rank sends."""
        return self.steps * self.size / self.ranks


@dataclass(frozen=True)
class Fit:
    """The line of one collective, over all numbers of ranks and sizes."""

    alpha: float  # seconds per step
    rate: float  # bytes per second and rank

    def seconds(self, timed: CollectiveTime) -> float:
        return timed.steps * self.alpha + timed.moved / self.rate


def worlds_of(machine: Machine) -> tuple[int, ...]:
    """Returns the numbers of ranks to time: 2, 4, 8, ... and as many as there are."""
    most = len(machine.gpus) if len(machine.gpus) > 1 else machine.cores
    return tuple(sorted({2**power for power in range(1, most.bit_length())} | {most})) if most > 1 else ()


def measure_collectives(worlds: Sequence[int], backend: str, timeout_s: float = 100.0) -> list[CollectiveTime]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if interface := loopback_interface():
        environment["GLOO_SOCKET_IFNAME"] = interface
    sizes, found = ",".join(map(str, SIZES[backend])), []
    for world in worlds:
        with tempfile.TemporaryDirectory(prefix="shardwise-link-") as folder:
            common = [str(Path(folder) / "store"), backend]
            arguments = [[*common, str(rank), str(world), sizes] for rank in range(world)]
            answer = run_ranks("shardwise.cluster.measure.collective_rank", arguments, environment, timeout_s)
        found += [CollectiveTime(*point) for point in json.loads(answer)]
    return found


def fit_collectives(points: Sequence[CollectiveTime]) -> dict[str, Fit]:
    return {
        name: fit([point for point in points if point.collective == name]) for name in {p.collective: 0 for p in points}
    }


def fit(points: Sequence[CollectiveTime]) -> Fit:
    alpha, beta = fit_line([(point.moved / point.steps, point.seconds / point.steps) for point in points])
    return Fit(alpha, 1 / beta if beta > 0 else float("inf"))


def with_collectives(cluster: ClusterSpec, points: Sequence[CollectiveTime]) -> ClusterSpec:
    """Returns the cluster with its fast link as measured: one line for all collectives."""
    line = fit(points)
    fast = replace(cluster.tiers[0], bandwidth=line.rate, alpha=line.alpha, share=1.0, half=0.0, summing=1.0, mesh=0)
    origins = {**cluster.origins, "link": "measured", "share": "measured"}
    return replace(cluster, tiers=(fast, *cluster.tiers[1:]), origins=MappingProxyType(origins))
