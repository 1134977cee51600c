"""`ClusterSpec`: devices, how many, and the links between them. What the planner knows of the hardware; no torch.

    4x8xh100                    4 nodes of 8 cards
    4x8xh100:nic=50GB/s         with one number changed

Links come in tiers, fastest first: the NVLink domain, the network cards, the spine of switches. A message between two ranks goes over the
first tier that joins them. Invariant: a `ClusterSpec` that exists has a positive rate everywhere, and says of every number where it is from.
Read next: read.py (from what people type), here.py (from this machine).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

Curve = tuple[tuple[float, float], ...]


def _empty() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class Device:
    """One card, or on a machine without cards one processor core while all cores are busy."""

    name: str
    memory: int  # bytes, as the driver gives them
    flops: Mapping[str, float] = field(hash=False)  # peak per second by number format: fp32 tf32 fp16 bf16 fp8 fp4
    achievable: float  # largest share of the peak that a matrix product reaches
    bandwidth: float  # bytes per second of its memory, read + written
    bandwidth_share: float = 0.85  # of it, reached by operations that do nothing else
    units: int = 1  # multiprocessors: a product's tiles run in waves of so many
    host: float = 25e9  # bytes per second to CPU memory, one direction
    watts: float = 0.0
    capability: tuple[int, int] = (0, 0)
    kind: str = "cuda"  # cuda | cpu
    power: str = ""  # what its power limit does
    launch: float = 2.5e-5  # host seconds of one operation inside a model: eager torch, modules and autograd around it
    curves: Mapping[str, Curve] = field(default_factory=_empty, hash=False)
    """Measured points, ascending. "matmul/bf16": (FLOPs of one product, FLOP/s reached); "attention/bf16" and "attention-backward/bf16" likewise;
    "elementwise": (bytes read + written, bytes per second)."""


@dataclass(frozen=True)
class Link:
    """One tier. A message of S bytes takes alpha + (S + half) / (bandwidth * share) seconds.

    In a ring over n ranks each step costs one alpha, and half counts once: an all-reduce takes 2(n-1) alpha + (2(n-1)/n S + half) / rate.
    """

    name: str  # nvlink | infinity-fabric | pcie | nic | spine | loopback
    span: int  # ranks that it joins, counted from the first of a node
    bandwidth: float  # bytes per second, rank and direction
    alpha: float = 5e-6  # seconds per message
    share: float = 0.8  # of the bandwidth, reached by the largest messages
    half: float = 1e6  # bytes at which half of that is reached
    summing: float = 1.0  # bus bandwidth of an all-reduce over that of a gather; above 1 where switches add
    mesh: int = (
        0  # without a switch: with so many others all wires of a rank are in use; a group of few uses few of them
    )

    def rate(self, members: int | None = None) -> float:
        """Bytes per second and rank that large messages reach among `members` neighbours."""
        wires = (members - 1) / self.mesh if self.mesh and members is not None and members > 1 else 1.0
        return self.bandwidth * self.share * min(1.0, wires)

    def seconds(self, size: float) -> float:
        """Of one message."""
        return self.alpha + (size + self.half) / (self.bandwidth * self.share) if size else self.alpha


HOST_MEMORY = 256 * 10**9
"""CPU memory for each device, where nobody says: 2 TB in a node of eight, as reference systems have. Assumed."""


@dataclass(frozen=True)
class ClusterSpec:
    name: str
    nodes: int
    per_node: int  # devices
    device: Device
    tiers: tuple[Link, ...]  # ascending by span; the last one joins all
    origins: Mapping[str, str] = field(default_factory=_empty, hash=False)  # number -> where it is from
    price: float | None = None  # per device and hour
    host_memory: int = 0  # bytes of CPU memory for each device; 0: assumed

    def __post_init__(self) -> None:
        assert self.nodes >= 1 and self.per_node >= 1, (self.nodes, self.per_node)
        assert self.tiers[-1].span >= self.world, (self.tiers, self.world)

    @property
    def world(self) -> int:
        return self.nodes * self.per_node

    @property
    def host_share(self) -> int:
        """Bytes of CPU memory that a device's rank may fill."""
        return self.host_memory or HOST_MEMORY

    def tier(self, reach: int) -> Link:
        """The fastest one that joins `reach` neighbouring ranks."""
        return next(link for link in self.tiers if link.span >= reach)


NVLINK_ALPHA, NVLINK_SETTLING = 3.5e-6, 27e-6
"""Seconds per step of a ring, and seconds that a collective takes to come up to speed: `Link.half` is the settling time at full rate.
Fitted with `share` to NCCL's all-reduce times of vTrain (1 MB to 1 GB). A100, 4 to 8 ranks: share 0.75, half 6 MB; mean error 3 %, largest 21 %
(at 1 MB); 2 and 3 ranks come out 12 % too fast. V100, 8 ranks: share 0.90, mean 2 %; it has no switch, and 2, 3 and 4 ranks have 22, 45 and 85 GB/s,
where `mesh` says 27, 54 and 81. H100: 458 GB/s of bus bandwidth measured for all-reduces over one node, where switches add (`summing`); its gathers
are assumed to reach 0.8, or 360 GB/s."""

NIC_ALPHA, NIC_SETTLING, NIC_SHARE = 1.5e-5, 60e-6, 0.85
"""The same between nodes. Share: 341 GB/s of bus bandwidth measured over two nodes of 8 H100 with 8 x 50 GB/s. On more nodes of that cluster the
measured 1 / bus bandwidth grows by 0.14 ps per byte with each rank (161 GB/s on 4 nodes, 53 on 16, 13 on 64): a fixed message whose time is the
alphas of a long ring, not a narrower network. alpha and settling: assumed, as usual for InfiniBand."""

PCIE_ALPHA, LOCAL_ALPHA = 1e-5, 1e-4  # assumed

SUSTAINED = 0.85
"""What a card reaches when one product runs again and again, over `achievable`, its best: power limits the clock. 672 of 794 TFLOP/s on an H200."""


@cache
def known_devices() -> Mapping[str, Mapping[str, Any]]:
    table = tomllib.loads(files("shardwise.cluster").joinpath("gpus.toml").read_text(encoding="utf-8"))

    def entry(name: str) -> dict[str, Any]:
        values = dict(table[name])
        if base := values.pop("extends", None):
            above = entry(base)
            above.pop("also", None)
            if "achievable" in values and "assumed" not in values:
                above["assumed"] = [number for number in above.get("assumed", ()) if number != "achievable"]
            return above | values
        return values

    return {name: entry(name) for name in table}


def known_cluster(kind: str, nodes: int, per_node: int, nic: float | None = None) -> ClusterSpec:
    """As the data sheet has it; `nic` is per device."""
    about = known_devices()[kind]
    world = nodes * per_node
    fast = _fast_link(about, min(about["domain"], world) if about.get("rack") else per_node)
    tiers = tiers_of(fast, nic or about["nic"] * network_cards(kind, per_node) / per_node, world)
    return ClusterSpec(f"{nodes}x{per_node}x{kind}", nodes, per_node, table_device(kind), tiers, table_origins(kind))


def table_device(kind: str) -> Device:
    about = known_devices()[kind]
    same = ("achievable", "bandwidth", "units", "host", "watts")
    return Device(
        name=kind,
        memory=int(about["memory"]),
        flops=MappingProxyType(about["flops"]),
        capability=tuple(about["capability"]),
        kind=about.get("kind", "cuda"),
        power=about.get("power", ""),
        **{name: about[name] for name in same},
    )


def network_cards(kind: str, per_node: int) -> int:
    """Of one node, in a vendor's reference system."""
    return max(1, round(known_devices().get(kind, {}).get("nics", 8) * per_node / 8))


def tiers_of(fast: Link, nic: float, world: int, pod: int | None = None, narrow: float = 1.0) -> tuple[Link, ...]:
    """The fast link, then network cards of `nic` bytes per second and device, then a spine `narrow` times narrower beyond `pod` devices."""
    if world <= fast.span:
        return (fast,)
    half, pod = nic * NIC_SHARE * NIC_SETTLING, min(pod or world, world)
    cards = Link("nic", pod, nic, NIC_ALPHA, NIC_SHARE, half)
    spine = Link("spine", world, nic / narrow, NIC_ALPHA, NIC_SHARE, half / narrow)
    return (fast, cards) if pod == world else (fast, cards, spine)


def _fast_link(about: Mapping[str, Any], span: int) -> Link:
    name, rate = about.get("link_name", "nvlink"), about["link"] * about["share"]
    alpha = {"pcie": PCIE_ALPHA, "loopback": LOCAL_ALPHA}.get(name, NVLINK_ALPHA)
    half = rate * NVLINK_SETTLING if name != "loopback" else 0.0
    more = {key: about[key] for key in ("summing", "mesh") if key in about}
    return Link(name, span, about["link"], alpha, about["share"], half, **more)


def table_origins(kind: str) -> dict[str, str]:
    about, sheet = known_devices()[kind], f"data sheet of {kind}"
    origins = dict.fromkeys(("flops", "bandwidth", "host", "watts", "link", "nic"), sheet)
    origins |= {"memory": "what drivers report", "achievable": "measured by others", "share": "measured by others"}
    origins |= dict.fromkeys((*about.get("assumed", ()), "launch"), "assumed")
    if about.get("link_name") == "pcie":
        without = "" if about.get("peer", True) else ", no peer access: messages pass through CPU memory"
        origins["link"] = f"{sheet}: PCIe{without}"
    return origins
