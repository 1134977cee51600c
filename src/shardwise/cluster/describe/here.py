"""Describes this machine as a `ClusterSpec`: its cards found in the table by name, what was measured in place of the
table's numbers. No torch.

Invariant: every number says whether it was measured here, is a data sheet's or is assumed. Where cards differ, the
smallest memory and the slowest rate count, because all ranks wait for the slowest. Read next: measure/devices.py.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType

from shardwise.cluster.describe.machine import Gpu, Machine, this_machine
from shardwise.cluster.describe.table import SUSTAINED, known_cluster, known_devices, table_device, table_origins
from shardwise.cluster.measure.devices import DeviceRates
from shardwise.cluster.measure.layers import devices_of, measure_layers, with_layers
from shardwise.cluster.measure.link import LinkFit, LinkNotMeasured, measure_local_link
from shardwise.spec.cluster import ClusterSpec, Device, Link


def measured_here() -> ClusterSpec:
    """Returns this machine as `doctor` and `bench layers` measure it. It takes ten seconds and more: torch is loaded in
    child processes."""
    machine = this_machine()
    link = None
    if not machine.gpus and machine.cores > 1:
        with suppress(LinkNotMeasured):
            link = measure_local_link()
    return with_layers(this_cluster(machine, (), link), measure_layers(devices_of(machine)))


def this_cluster(machine: Machine, rates: Sequence[DeviceRates] = (), link: LinkFit | None = None) -> ClusterSpec:
    """Returns one node: its GPUs, or without any one rank per core. Without `rates` nothing is measured, and this takes
    no time."""
    if machine.gpus:
        return _gpus(machine, [entry for entry in rates if entry.device != "cpu"])
    return _cores(machine, next((entry for entry in rates if entry.device == "cpu"), None), link)


def _cores(machine: Machine, rates: DeviceRates | None, link: LinkFit | None) -> ClusterSpec:
    origins = table_origins("cpu") | {"memory": f"the machine's, over {machine.cores} cores"}
    device = replace(table_device("cpu"), memory=machine.memory_bytes // machine.cores)
    nodes, per_node = machine.nodes, machine.cores // machine.nodes
    if rates is not None and rates.flops_per_s:
        each = {name: rate / machine.cores for name, rate in rates.flops_per_s.items()}
        device = replace(device, flops=MappingProxyType(each), achievable=1.0)
        origins |= dict.fromkeys(("flops", "achievable"), "measured")
    if rates is not None and rates.copy_bytes_per_s:
        rate = rates.copy_bytes_per_s / machine.cores
        device = replace(device, bandwidth=rate, bandwidth_share=1.0, host=rate)
        origins |= dict.fromkeys(("bandwidth", "host"), "measured")
    tiers = known_cluster("cpu", nodes, per_node).tiers
    if link is not None and link.beta_s_per_byte > 0:
        tiers = (Link("loopback", per_node, link.bytes_per_s, link.alpha_s, 1.0, 0.0), *tiers[1:])
        origins["link"] = "measured"
    return ClusterSpec("this", nodes, per_node, device, tiers, origins)


def _gpus(machine: Machine, rates: Sequence[DeviceRates]) -> ClusterSpec:
    found = [_device(gpu) for gpu in machine.gpus]
    slowest, origins = min(found, key=lambda pair: max(pair[0].flops.values()) * pair[0].achievable)
    least = min(gpu.memory_bytes for gpu in machine.gpus)
    device = replace(slowest, memory=least)
    origins = origins | {"memory": "this machine's driver"}
    if len({(gpu.name, gpu.memory_bytes) for gpu in machine.gpus}) > 1:
        names = ", ".join(sorted({gpu.name for gpu in machine.gpus}))
        origins["device"] = f"unequal cards ({names}): the smallest memory and the slowest rates count for all"
    device, origins = _with_rates(device, origins, rates)
    tiers, origin = _links(machine, device.name)
    if origin:
        origins["link"] = origin
    share = machine.memory_bytes // len(machine.gpus)
    per_node = len(machine.gpus) // machine.nodes
    return ClusterSpec("this", machine.nodes, per_node, device, tiers, origins, host_memory=share)


def _links(machine: Machine, kind: str) -> tuple[tuple[Link, ...], str]:
    """Returns the links between the cards and where they are known from: the table's for a card that is in it; what the
    driver says on peer access comes first."""
    nodes, per_node = machine.nodes, len(machine.gpus) // machine.nodes
    if per_node > 1 and any(gpu.peers == 0 for gpu in machine.gpus):
        said = "PCIe, no peer access, says the driver: transfers pass through CPU memory; the rate is assumed"
        return known_cluster("rtx4090", nodes, per_node).tiers, said
    if kind not in known_devices():
        return known_cluster("l40s", nodes, per_node).tiers, "assumed: PCIe"
    return known_cluster(kind, nodes, per_node).tiers, ""


def _with_rates(device: Device, origins: dict[str, str], rates: Sequence[DeviceRates]) -> tuple[Device, dict[str, str]]:
    """Returns the device with what was measured in place of the table's share of the peak; the slowest of several cards
    counts."""
    formats = {name for entry in rates for name in entry.flops_per_s}
    reached = {name: min(entry.flops_per_s.get(name, float("inf")) for entry in rates) for name in formats}
    copy_rates = [entry.copy_bytes_per_s for entry in rates if entry.copy_bytes_per_s]
    if "bf16" in reached and "bf16" in device.flops:
        device = replace(device, achievable=min(1.0, reached["bf16"] / device.flops["bf16"] / SUSTAINED))
        origins = origins | {"achievable": "measured"}
    elif reached and device.name not in known_devices():
        device = replace(device, flops=MappingProxyType(reached), achievable=1.0)
        origins = origins | dict.fromkeys(("flops", "achievable"), "measured")
    if copy_rates:
        device = replace(device, bandwidth_share=min(1.0, min(copy_rates) / device.bandwidth))
        origins = origins | {"bandwidth_share": "measured"}
    return device, origins


def _device(gpu: Gpu) -> tuple[Device, dict[str, str]]:
    kind = table_name(gpu)
    if kind is not None:
        return table_device(kind), table_origins(kind)
    nearest = _nearest(gpu)
    device = replace(table_device(nearest), name=gpu.name, capability=gpu.capability, power="")
    return device, dict.fromkeys(table_origins(nearest), f"assumed: as {nearest}, the nearest card in the table")


def table_name(gpu: Gpu) -> str | None:
    """Returns the card's entry in the table; of several versions the one with the nearest memory."""
    words = set(re.split(r"[^a-z0-9]+", gpu.name.lower()))
    if words & {"laptop", "mig"}:  # other chips under the same name, parts of chips
        return None
    table = known_devices()
    said = {kind: set(about["says"]) for kind, about in table.items() if "says" in about}
    said = {kind: names for kind, names in said.items() if names <= words}
    if not said:
        return None
    most = max(map(len, said.values()))
    versions = [kind for kind, names in said.items() if len(names) == most]
    return min(versions, key=lambda kind: abs(table[kind]["memory"] - gpu.memory_bytes))


def _nearest(gpu: Gpu) -> str:
    """Returns the card in the table that is nearest: of the same generation where there is one, with a memory as
    large."""
    table = {
        kind: about
        for kind, about in known_devices().items()
        if about.get("kind", "cuda") == "cuda" and about.get("link_name") != "infinity-fabric"
    }

    def distance(kind: str) -> tuple[bool, int, float]:
        major, minor = table[kind]["capability"]
        off = abs(minor - gpu.capability[1])
        return major != gpu.capability[0], off, abs(table[kind]["memory"] - gpu.memory_bytes)

    return min(table, key=distance)
