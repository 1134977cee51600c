"""Reads numbers that a person gives instead of the table's: `nic=50GB/s,memory=80GB`. They are read with units, checked
and applied. No torch.

Invariant: a value that comes out of `read_setting` is one that hardware could have; what is absurd is refused with the
range.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cluster.describe.table import known_devices, network_cards, tiers_of
from shardwise.config.units import format_bytes, parse_bytes, parse_rate, parse_seconds
from shardwise.errors import UserError
from shardwise.spec.cluster import ClusterSpec, Link


@dataclass(frozen=True)
class Setting:
    """What a setting means, and the values that make sense."""

    meaning: str
    kind: str  # count | number | bytes | rate | seconds
    low: float
    high: float
    example: str


RATES = (1e6, 1e13)
SETTINGS = {
    "nodes": Setting("machines", "count", 1, 100_000, "4"),
    "per_node": Setting("devices in one of them", "count", 1, 576, "8"),
    "memory": Setting("bytes of one device", "bytes", 2**26, 2**43, "80GB"),
    "link": Setting("the fast link, per device and direction", "rate", *RATES, "450GB/s"),
    "domain": Setting("devices that the fast link joins", "count", 1, 100_000, "8"),
    "nic": Setting("one network card", "rate", *RATES, "50GB/s"),
    "nics": Setting("network cards of one machine", "count", 1, 64, "8"),
    "pod": Setting("devices below one leaf of the network", "count", 1, 1_000_000, "256"),
    "oversubscription": Setting("how many times narrower the network is beyond a pod", "number", 1, 100, "2"),
    "host": Setting("device to CPU memory, one direction", "rate", *RATES, "50GB/s"),
    "cpu_memory": Setting("CPU memory of one machine", "bytes", 2**28, 2**47, "512GB"),
    "price": Setting("of one device for an hour", "number", 0, 10_000, "2.5"),
}
PARSE: Mapping[str, Callable[[str], float]] = {
    "bytes": parse_bytes,
    "rate": parse_rate,
    "seconds": parse_seconds,
    "count": int,
    "number": float,
}
SHOWN: Mapping[str, Callable[[float], str]] = {
    "bytes": lambda value: format_bytes(int(value)),
    "rate": lambda value: f"{value / 1e9:g} GB/s" if value >= 1e6 else f"{value:g} bytes per second",
    "seconds": lambda value: f"{value:g} s",
    "count": lambda value: f"{value:,.0f}",
}


def read_settings(text: str, where: str) -> dict[str, Any]:
    """Returns the values of a text such as `nic=50GB/s,nics=4`."""
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            fix = f"for example `{where}:nic=50GB/s`"
            raise UserError(f"`{part}` in `{where}:{text}` has no value", why="settings are name=value, ...", fix=fix)
        if name not in SETTINGS:
            raise unknown("setting", name, SETTINGS, None)
        given[name] = read_setting(name, value, SETTINGS[name], None)
    return given


def read_setting(name: str, raw: Any, about: Setting, where: str | None) -> Any:
    """Returns the value of a text with a unit, or of a plain number in bytes, bytes per second or seconds."""
    try:
        value: float = _number(raw, about.kind)
    except (ValueError, OverflowError) as problem:
        why = str(problem) if "expected" in str(problem) else f"{name} is {about.meaning}"
        fix = f"for example `{name}={about.example}`"
        raise UserError(f"`{name}` cannot be read from `{raw}`", why=why, fix=fix, where=where) from None
    if not about.low <= value <= about.high:
        shown = SHOWN.get(about.kind, "{:g}".format)
        why = (
            f"{name} ({about.meaning}) is {shown(value)} here; from {shown(about.low)} to {shown(about.high)} makes "
            f"sense"
        )
        raise UserError(
            f"`{name}={raw}` is out of range", why=why, fix=f"for example `{name}={about.example}`", where=where
        )
    return int(value) if about.kind in ("count", "bytes") else value


def _number(raw: Any, kind: str) -> float:
    """Returns the number that was written, in bytes, bytes per second or seconds by its kind."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | str):
        raise ValueError("expected a number")
    if isinstance(raw, str):
        try:
            raw = float(raw)
        except ValueError:
            return PARSE[kind](str(raw))
    if not math.isfinite(raw) or (kind == "count" and raw != int(raw)):
        raise ValueError("expected a whole number" if kind == "count" else "expected a number")
    return raw


def unknown(noun: str, name: str, known: Iterable[str], where: str | None) -> UserError:
    """Returns the error for a `name` that is not one of `known`: it says which are, and the nearest."""
    names = sorted(known)
    near = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.5)
    fix = f"did you mean `{near[0]}`?" if near else f"for example `{names[0]}`"
    return UserError(f"unknown {noun} `{name}`", why=f"there are: {', '.join(names)}", fix=fix, where=where)


def kind_of(name: str, where: str | None = None) -> str:
    """Returns the table's name of a GPU for what people call it."""
    table = known_devices()
    others = {also: kind for kind, about in table.items() for also in about.get("also", ())}
    lower = name.lower().replace("_", "-").removeprefix("nvidia-")
    if lower in table or lower in others:
        return others.get(lower, lower)
    raise unknown("GPU", name, table, where)


def changed(cluster: ClusterSpec, given: Mapping[str, Any], origin: str = "typed") -> ClusterSpec:
    """Returns the same cluster with other numbers; `given` is as read_settings makes it."""
    if not given:
        return cluster
    nodes, per_node = given.get("nodes", cluster.nodes), given.get("per_node", cluster.per_node)
    world, fast = nodes * per_node, cluster.tiers[0]
    rate = given.get("link", fast.bandwidth)
    span = min(given.get("domain") or _domain(cluster, per_node, world), world)
    fast = replace(fast, span=span, bandwidth=rate, half=fast.half * rate / fast.bandwidth)
    tiers: tuple[Link, ...] = (fast,)
    if world > span:
        tiers = _network(cluster, fast, given, nodes, per_node)
    device = replace(cluster.device, **{key: given[key] for key in ("memory", "host") if key in given})
    name = cluster.name if world == cluster.world else f"{nodes}x{per_node}x{cluster.device.name}"
    origins = {**cluster.origins, **dict.fromkeys(given, origin)}
    host = given["cpu_memory"] // per_node if "cpu_memory" in given else cluster.host_memory
    return ClusterSpec(name, nodes, per_node, device, tiers, origins, given.get("price", cluster.price), host)


def _network(cluster: ClusterSpec, fast: Link, given: Mapping[str, Any], nodes: int, per_node: int) -> tuple[Link, ...]:
    world, network = nodes * per_node, cluster.tiers[1:]
    if network and not given.keys() & {"nic", "nics", "pod", "oversubscription"}:
        return (fast, *network[:-1], replace(network[-1], span=max(world, network[-1].span)))
    about = known_devices().get(cluster.device.name, {})
    if given.keys().isdisjoint({"nic", "nics"}) and network:
        rate = network[0].bandwidth
    elif "nic" in given or about:
        cards = given.get("nics") or network_cards(cluster.device.name, per_node)
        rate = given.get("nic", about.get("nic")) * cards / per_node
    else:
        why = f"{nodes} machines are asked for, and {cluster.name} does not say what joins them"
        raise UserError("the network between machines is not known", why=why, fix="add `nic=50GB/s`")
    beyond = network[0].bandwidth / network[-1].bandwidth if network else 1.0
    pod = given.get("pod", network[0].span if len(network) > 1 else world)
    return tiers_of(fast, rate, world, pod, given.get("oversubscription", beyond))


def _domain(cluster: ClusterSpec, per_node: int, world: int) -> int:
    """Returns how many devices the fast link connects."""
    about = known_devices().get(cluster.device.name, {})
    if about.get("rack"):
        return min(about["domain"], world)
    span = cluster.tiers[0].span
    return per_node if span == cluster.per_node else span
