"""Makes clusters from the one table of cards that there is, cluster/gpus.toml: `known_cluster("h100", 4, 8)`. No torch.

The table holds what data sheets say and what others measured; how fast links settle is here, beside the functions that
make links. Invariant: every number of a cluster that comes from here says in `origins` where it is from. Read next:
read.py, here.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from shardwise.spec.cluster import ClusterSpec, Device, Link

NVLINK_ALPHA, NVLINK_SETTLING = 3.5e-6, 27e-6
"""Seconds per step of a ring, and seconds that a collective takes to come up to speed: `Link.half` is the settling time
at full rate. Fitted with `share` to NCCL's all-reduce times of vTrain (1 MB to 1 GB). A100, 4 to 8 ranks: share 0.75,
half 6 MB; mean error 3 %, largest 21 % (at 1 MB); 2 and 3 ranks come out 12 % too fast. V100, 8 ranks: share 0.90, mean
2 %; it has no switch, and 2, 3 and 4 ranks have 22, 45 and 85 GB/s, where `mesh` says 27, 54 and 81. H100: 458 GB/s of
bus bandwidth measured for all-reduces over one node, where switches add (`summing`); its gathers are assumed to reach
0.8, or 360 GB/s."""

NIC_ALPHA, NIC_SETTLING, NIC_SHARE = 1.5e-5, 60e-6, 0.85
"""Latency, settling time and share of links between nodes. Share: 341 GB/s of bus bandwidth measured over two nodes of
8 H100 with 8 x 50 GB/s. On more nodes of that cluster the measured 1 / bus bandwidth grows by 0.14 ps per byte with
each rank (161 GB/s on 4 nodes, 53 on 16, 13 on 64): a transfer of fixed size whose time is the alphas of a long ring,
not a narrower network. alpha and settling: assumed, as usual for InfiniBand."""

PCIE_ALPHA, LOCAL_ALPHA = 1e-5, 1e-4  # seconds per step of a ring, assumed

SUSTAINED = 0.85
"""What a card reaches when one matmul runs again and again, as a share of `achievable`, its best: power limits the
clock. 672 of 794 TFLOP/s on an H200."""


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
    """Returns a cluster as the data sheet has it; `nic` is in bytes per second and device."""
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
    """Returns how many network cards one node has, in a vendor's reference system."""
    return max(1, round(known_devices().get(kind, {}).get("nics", 8) * per_node / 8))


def tiers_of(fast: Link, nic: float, world: int, pod: int | None = None, narrow: float = 1.0) -> tuple[Link, ...]:
    """Returns the links, fastest first: the fast link, then network cards of `nic` bytes per second and device, then a
    spine `narrow` times narrower beyond `pod` devices."""
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
        without = "" if about.get("peer", True) else ", no peer access: transfers pass through CPU memory"
        origins["link"] = f"{sheet}: PCIe{without}"
    return origins
