"""What an answer rests on, each with its origin: typed, assumed, from a data sheet or measured. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.config.units import format_bytes
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.precisions import PRECISIONS

TYPED, ASSUMED = "typed", "assumed"


@dataclass(frozen=True)
class Assumption:
    """One figure that the answer rests on, and where it is from."""

    what: str
    value: str
    origin: str  # typed | assumed | data sheet | measured ...


def hardware_assumptions(cluster: ClusterSpec, precision: str) -> list[Assumption]:
    device, origins = cluster.device, cluster.origins
    kind = PRECISIONS[precision].matmul
    peak = kind if kind in device.flops else max(device.flops, key=lambda name: device.flops[name])

    def of(*names: str) -> str:
        return next((origins[name] for name in names if name in origins), "data sheet")

    cpu_memory = origins.get("cpu_memory", "measured" if cluster.host_memory else "assumed")
    found = [
        Assumption("memory of a device", format_bytes(device.memory), of("memory")),
        Assumption(f"peak {peak}", f"{device.flops[peak] / 1e12:,.3g} TFLOP/s", of("flops")),
        Assumption("largest share of the peak", f"{100 * device.achievable:.0f} %", of("achievable")),
        Assumption("memory bandwidth", f"{device.bandwidth / 1e9:,.4g} GB/s", of("bandwidth")),
        Assumption("to CPU memory", f"{device.host / 1e9:,.3g} GB/s", of("host")),
        Assumption("CPU memory per device", f"{cluster.host_share / 1e9:,.0f} GB", cpu_memory),
    ]
    for number, link in enumerate(cluster.tiers):
        origin = of("link") if number == 0 else of(link.name, "nic")
        found.append(Assumption(link.name, f"{link.bandwidth / 1e9:,.3g} GB/s per device among {link.span:,}", origin))
    if device.watts:
        found.append(Assumption("power", f"{device.watts:.0f} W per device", of("watts")))
    found.append(Assumption("MFU", "counts causal attention once and nothing that is computed again", "convention"))
    found.append(Assumption("p10-p90", "where 8 of 10 published runs of this kind lay", "convention"))
    return found
