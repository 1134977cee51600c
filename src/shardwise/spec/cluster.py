"""Defines `ClusterSpec`: devices, how many, and the links between them. It is what the planner knows of the hardware.
No torch, and no table: only what a cluster is.

    4x8xh100                    4 nodes of 8 cards
    4x8xh100:nic=50GB/s         with one number changed

Links come in tiers, fastest first: the NVLink domain, the network cards, the spine of switches. What two ranks send
each other goes over the first tier that joins them. Invariant: a `ClusterSpec` that exists has a positive rate
everywhere, and says of every number where it is from. Read next: cluster/describe/table.py (cards that are known by
name), read.py (from what people type), here.py (from this machine).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import Any

HEADROOM = 0.93
"""The share of a device's memory, or of a limit, that predictions may fill where there is a choice: the rest is the
driver's and the communication library's. The planner, a run's own choices and its micro-batch search all keep it."""

HOST_HEADROOM = 0.8
"""The share of a machine's CPU memory that may be filled with what its devices keep there: the rest is the system's,
its file cache's and the data loader's."""

Curve = tuple[tuple[float, float], ...]


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Device:
    """One card, or on a machine without cards one processor core while all cores are busy."""

    name: str
    memory: int  # bytes, as the driver gives them
    flops: Mapping[str, float] = field(hash=False)  # peak per second by number format: fp32 tf32 fp16 bf16 fp8 fp4
    achievable: float  # largest share of the peak that a matmul reaches
    bandwidth: float  # bytes per second of its memory, read + written
    bandwidth_share: float = 0.85  # the share of it that operations reach which do nothing else
    units: int = 1  # multiprocessors: a matmul's tiles run in waves of so many
    host: float = 25e9  # bytes per second to CPU memory, one direction
    watts: float = 0.0
    capability: tuple[int, int] = (0, 0)
    kind: str = "cuda"  # cuda | cpu
    power: str = ""  # what its power limit does
    launch: float = 2.5e-5  # host seconds per operation inside a model: eager torch, modules and autograd around it
    curves: Mapping[str, Curve] = field(default_factory=_empty, hash=False)
    """Measured points, ascending. "matmul/bf16": (FLOPs of one matmul, FLOP/s reached); "attention/bf16" and
    "attention-backward/bf16" likewise; "elementwise": (bytes read + written, bytes per second)."""


@dataclass(frozen=True)
class Link:
    """One tier of links. To send S bytes takes alpha + (S + half) / (bandwidth * share) seconds.

    In a ring over n ranks each step costs one alpha, and half counts once: an all-reduce takes 2(n-1) alpha + (2(n-1)/n
    S + half) / rate.
    """

    name: str  # nvlink | infinity-fabric | pcie | nic | spine | loopback
    span: int  # number of ranks that it joins, counted from the first of a node
    bandwidth: float  # bytes per second, rank and direction
    alpha: float = 5e-6  # seconds per send
    share: float = 0.8  # the share of the bandwidth that the largest sends reach
    half: float = 1e6  # bytes at which half of that is reached
    summing: float = 1.0  # bus bandwidth of an all-reduce over that of an all-gather; above 1 where switches add
    mesh: int = 0  # without a switch: the peers with which all wires of a rank are in use; small groups use fewer

    def rate(self, members: int | None = None) -> float:
        """Returns the bytes per second and rank that large transfers reach among `members` neighbours."""
        wires = (members - 1) / self.mesh if self.mesh and members is not None and members > 1 else 1.0
        return self.bandwidth * self.share * min(1.0, wires)

    def seconds(self, size: float) -> float:
        """Returns the seconds that it takes to send `size` bytes."""
        return self.alpha + (size + self.half) / (self.bandwidth * self.share) if size else self.alpha


HOST_MEMORY = 256 * 10**9
"""Bytes of CPU memory for each device, where nobody says: 2 TB in a node of eight, as reference systems have.
Assumed."""


@dataclass(frozen=True)
class ClusterSpec:
    """Nodes of equal devices and the links between them."""

    name: str
    nodes: int
    per_node: int  # devices of a node
    device: Device
    tiers: tuple[Link, ...]  # ascending by span; the last one joins all
    origins: Mapping[str, str] = field(default_factory=_empty, hash=False)  # number -> where it is from
    price: float | None = None  # per device and hour
    host_memory: int = 0  # bytes of CPU memory for each device; 0: assumed

    def __post_init__(self) -> None:
        assert self.nodes >= 1 and self.per_node >= 1, (self.nodes, self.per_node)
        assert self.tiers[-1].span >= self.world, (self.tiers, self.world)

    @classmethod
    def parse(cls, text: str) -> ClusterSpec:
        """Returns the cluster that a text means: `8xh100`, `4x8xh100:nic=50GB/s`, `this`, or a TOML file's path."""
        read = import_module("shardwise.cluster.describe.read")  # the table of devices is in a room above this one
        found: ClusterSpec = read.read_cluster(str(text))
        return found

    @property
    def world(self) -> int:
        """The number of devices."""
        return self.nodes * self.per_node

    @property
    def host_share(self) -> int:
        """The bytes of CPU memory for each device."""
        return self.host_memory or HOST_MEMORY

    def host_room(self, ranks: int) -> int:
        """Returns the bytes of CPU memory that each of so many ranks may fill; those of one node share it."""
        return int(HOST_HEADROOM * self.host_share * self.per_node) // min(ranks, self.per_node)

    def nodes_of(self, ranks: int) -> int:
        """Returns the number of nodes that so many ranks take."""
        return -(-ranks // self.per_node)

    def tier(self, reach: int) -> Link:
        """Returns the fastest link that joins `reach` neighbouring ranks."""
        return next(link for link in self.tiers if link.span >= reach)
