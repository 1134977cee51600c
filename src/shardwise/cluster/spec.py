"""`ClusterSpec`: devices, how many, and the links between them. What the planner knows of the hardware; no torch.

    4x8xh100                    4 nodes of 8 cards
    4x8xh100:nic=50GB/s         with one number changed

Links come in tiers, fastest first: the NVLink domain, the network cards, the spine of switches. A message between two ranks goes over the
first tier that joins them. Invariant: a `ClusterSpec` that exists has a positive rate everywhere, and says of every number where it is from.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Device:
    """One card, or on a machine without cards one processor core."""

    name: str
    memory: int  # bytes
    flops: Mapping[str, float]  # peak per second by number format: fp32 tf32 fp16 bf16 fp8 fp4
    achievable: float  # largest share of the peak that a matrix product reaches
    bandwidth: float  # bytes per second of its memory, read + written
    bandwidth_share: float = 0.85  # of it, reached by operations that do nothing else
    units: int = 1  # multiprocessors: a product's tiles run in waves of so many
    host: float = 25e9  # bytes per second to CPU memory, one direction
    watts: float = 0.0
    capability: tuple[int, int] = (0, 0)
    kind: str = "cuda"  # cuda | cpu


@dataclass(frozen=True)
class Link:
    """One tier. A message of S bytes takes alpha + S / (bandwidth * efficiency(S)) seconds."""

    name: str  # nvlink | pcie | nic | spine | loopback
    span: int  # ranks that it joins, counted from the first of a node
    bandwidth: float  # bytes per second, rank and direction
    alpha: float = 5e-6  # seconds per message
    share: float = 0.8  # of the bandwidth, reached by the largest messages
    half: float = 1e6  # bytes at which half of that is reached

    def seconds(self, size: float) -> float:
        """Of one message."""
        return self.alpha + (size + self.half) / (self.bandwidth * self.share) if size else self.alpha


@dataclass(frozen=True)
class ClusterSpec:
    name: str
    nodes: int
    per_node: int  # devices
    device: Device
    tiers: tuple[Link, ...]  # ascending by span; the last one joins all
    origins: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # number -> where it is from
    price: float | None = None  # per device and hour

    def __post_init__(self) -> None:
        assert self.nodes >= 1 and self.per_node >= 1, (self.nodes, self.per_node)
        assert self.tiers[-1].span >= self.world, (self.tiers, self.world)

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    def tier(self, reach: int) -> Link:
        """The fastest one that joins `reach` neighbouring ranks."""
        return next(link for link in self.tiers if link.span >= reach)


@cache
def known_devices() -> Mapping[str, Mapping[str, Any]]:
    table = tomllib.loads(files("shardwise.cluster").joinpath("gpus.toml").read_text(encoding="utf-8"))

    def entry(name: str) -> dict[str, Any]:
        values = dict(table[name])
        base = values.pop("extends", None)
        return {**entry(base), **values} if base else values

    return {name: entry(name) for name in table}


def known_cluster(kind: str, nodes: int, per_node: int, nic: float | None = None) -> ClusterSpec:
    """As the data sheet has it."""
    about = known_devices()[kind]
    device = Device(
        name=kind,
        memory=int(about["memory"]),
        flops=MappingProxyType(about["flops"]),
        achievable=about["achievable"],
        bandwidth=about["bandwidth"],
        units=about["units"],
        host=about["host"],
        watts=about["watts"],
        capability=tuple(about["capability"]),
    )
    inside = Link("nvlink", max(per_node, min(about["domain"], nodes * per_node)), about["link"], 5e-6)
    tiers = [inside]
    if nodes * per_node > inside.span:
        tiers.append(Link("nic", nodes * per_node, nic or about["nic"], 1.5e-5))
    return ClusterSpec(f"{nodes}x{per_node}x{kind}", nodes, per_node, device, tuple(tiers))
