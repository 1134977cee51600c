"""Reads and writes a cluster as a file: what `shardwise doctor --out` writes and people edit. No torch.

    nodes = 4
    per_node = 8
    gpu = "h100"                # from the table; what follows replaces its numbers
    nic = "400Gb/s"             # any setting of changes.py
    price = 2.5                 # per device and hour

    [device]                    # numbers of one device
    memory = "80GB"
    flops = { bf16 = 989e12 }

    [[tier]]                    # instead of link and nic: the links themselves, fastest first
    name = "nvlink"
    span = 8
    bandwidth = "450GB/s"
    alpha = "4us"

Invariant: unknown keys are refused, so a slip of the fingers never leaves the table's number standing; `write_toml`
reads back as itself.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from shardwise.cluster.describe.changes import RATES, SETTINGS, Setting, changed, kind_of, read_setting, unknown
from shardwise.cluster.describe.table import known_cluster
from shardwise.config.keys import section_classes
from shardwise.config.lines import parse_toml
from shardwise.config.values import shown
from shardwise.errors import UserError
from shardwise.files import read_text
from shardwise.spec.cluster import ClusterSpec, Device, Link

SHARE = Setting("a share of the peak", "number", 1e-3, 1.5, "0.8")
SECONDS = Setting("seconds", "seconds", 0, 10, "5us")
FLOPS = Setting("FLOP/s", "number", 1e6, 1e18, "989e12")
BYTES = Setting("bytes", "bytes", 0, 2**50, "1MB")
DEVICE = {
    "memory": SETTINGS["memory"],
    "achievable": SHARE,
    "bandwidth": Setting("bytes per second of its memory, read + written", "rate", 1e6, 1e15, "3.35TB/s"),
    "bandwidth_share": SHARE,
    "units": Setting("multiprocessors", "count", 1, 10_000, "132"),
    "host": SETTINGS["host"],
    "watts": Setting("watts", "number", 0, 100_000, "700"),
    "launch": SECONDS,
}
TIER = {
    "span": Setting("devices that it joins", "count", 1, 10_000_000, "8"),
    "bandwidth": Setting("per device and direction", "rate", *RATES, "50GB/s"),
    "alpha": SECONDS,
    "share": SHARE,
    "half": BYTES,
    "summing": Setting("all-reduce over gather", "number", 0.1, 10, "1.0"),
    "mesh": Setting("devices that each has wires to", "count", 0, 1000, "7"),
}
LINKS = ("link", "domain", "nic", "nics", "pod", "oversubscription")
TOP = {*SETTINGS, "schema", "name", "gpu", "device", "tier", "machine", "origins"}


def cluster_from_toml(path: str) -> ClusterSpec:
    try:
        text = read_text(Path(path))
    except (OSError, UnicodeDecodeError) as problem:
        fix = "`shardwise doctor --out cluster.toml` writes one; `8xh100` needs none"
        raise UserError(
            f"cannot read {path}", why=getattr(problem, "strerror", None) or "it is no text", fix=fix
        ) from None
    try:
        document = parse_toml(text)
    except (tomllib.TOMLDecodeError, RecursionError) as problem:
        fix = "`shardwise doctor --out` writes one that works"
        raise UserError(f"{path} is no TOML file", why=str(problem), fix=fix) from None
    return _cluster(document, path)


def _cluster(document: Mapping[str, Any], path: str) -> ClusterSpec:
    if isinstance(document.get("link"), list):
        fix = f"`shardwise doctor --out {path} --force` writes it anew"
        raise UserError(f"{path} is of an earlier version", why="links are [[tier]] now", fix=fix)
    if not set(document) & TOP and set(document) & set(section_classes()):
        why = "it has sections of a run's config; a cluster file has keys such as gpu, nodes and per_node"
        raise UserError(f"{path} is no cluster", why=why, fix="`shardwise doctor --out cluster.toml` writes one")
    _known(document, TOP, "key", path)
    if document.get("schema", 1) != 1:
        raise UserError(f"{path} has schema {document['schema']}", why="this version reads schema 1", fix="schema = 1")
    given = {name: read_setting(name, document[name], SETTINGS[name], path) for name in SETTINGS if name in document}
    if "tier" in document and (twice := [name for name in LINKS if name in given]):
        why = "[[tier]] describes the links already"
        raise UserError(f"{path} says twice how fast links are", why=why, fix=f"leave out {', '.join(twice)}")
    nodes, per_node = given.pop("nodes", 1), given.pop("per_node", 1)
    base = None
    if "gpu" in document:
        base = known_cluster(kind_of(_text(document, "gpu", path), path), nodes, per_node)
    device = _device(_table(document, "device", path), base.device if base else None, path)
    tiers = _tiers(
        document.get("tier"), nodes * per_node, {tier.name: tier for tier in base.tiers} if base else {}, path
    )
    if base is None and tiers is None:
        why = "without `gpu` the file says itself what joins the devices"
        raise UserError(f"{path} has no [[tier]]", why=why, fix='add `gpu = "h100"`, or a [[tier]] with its bandwidth')
    origins = dict.fromkeys((*_table(document, "device", path), *(["link", "nic"] if tiers else [])), path)
    name = _text(document, "name", path) if "name" in document else (base.name if base else Path(path).stem)
    known = tiers or (base.tiers if base else ())
    cluster = ClusterSpec(name, nodes, per_node, device, known, {**(base.origins if base else {}), **origins})
    cluster = changed(cluster, given, path)
    if "origins" in document:  # then it says so itself
        origins = {name: str(origin) for name, origin in _table(document, "origins", path).items()}
        return replace(cluster, origins=MappingProxyType(origins))
    return cluster


def _device(table: Mapping[str, Any], base: Device | None, path: str) -> Device:
    _known(table, {field.name for field in fields(Device)}, "key of [device]", path)
    numbers = {name: read_setting(name, table[name], DEVICE[name], path) for name in DEVICE if name in table}
    more: dict[str, Any] = {name: _text(table, name, path) for name in ("name", "kind", "power") if name in table}
    if more.get("kind", "cuda") not in ("cuda", "cpu"):
        raise UserError(
            f"device.kind is {shown(more['kind'])}", why="it is cuda or cpu", fix='kind = "cuda"', where=path
        )
    if "capability" in table:
        more["capability"] = _pair(table["capability"], path)
    if "flops" in table:
        rates = _table(table, "flops", path)
        _known(rates, {"fp32", "tf32", "fp16", "bf16", "fp8", "fp4"}, "number format", path)
        own = {name: read_setting(f"flops.{name}", value, FLOPS, path) for name, value in rates.items()}
        more["flops"] = MappingProxyType({**(base.flops if base else {}), **own})
    if "curves" in table:
        more["curves"] = MappingProxyType(
            {name: _curve(name, v, path) for name, v in _table(table, "curves", path).items()}
        )
    if base is not None:
        return replace(base, **numbers, **more)
    if missing := [name for name in ("memory", "flops", "bandwidth") if name not in table]:
        fix = 'add them, or `gpu = "h100"` to take them from the table'
        raise UserError(
            f"{path}: [device] has no {', '.join(missing)}", why="nothing is known of it otherwise", fix=fix
        )
    return Device(**{"name": "device", "achievable": 1.0, **numbers, **more})


def _tiers(raw: Any, world: int, table: Mapping[str, Link], path: str) -> tuple[Link, ...] | None:
    """Returns the links that a file describes; one of the table's name takes from there what it leaves out."""
    if raw is None:
        return None
    if not isinstance(raw, list) or not raw or not all(isinstance(entry, dict) for entry in raw):
        raise UserError(
            f"{path}: tier is no list of tables", why="each link is a [[tier]]", fix="write `[[tier]]` above it"
        )
    tiers = []
    for entry in raw:
        _known(entry, {"name", *TIER}, "key of [[tier]]", path)
        numbers = {name: read_setting(name, entry[name], TIER[name], path) for name in TIER if name in entry}
        known = table.get(str(entry.get("name")))
        if known is not None:
            settled = known.half * numbers.get("bandwidth", known.bandwidth) / known.bandwidth  # in the same time
            tiers.append(replace(known, **{"half": settled, **numbers}))
            continue
        if "bandwidth" not in entry:
            others = f" or name = {shown(next(iter(table)))}, which the table knows" if table else ""
            fix = f'bandwidth = "50GB/s"{others}'
            raise UserError(f"{path}: a [[tier]] has no bandwidth", why="it is what is planned with", fix=fix)
        tiers.append(Link(**{"name": str(entry.get("name", "link")), "span": world, **numbers}))
    tiers.sort(key=lambda tier: tier.span)
    if tiers[-1].span < world:
        why = f"the widest [[tier]] joins {tiers[-1].span} of {world} devices"
        raise UserError(f"{path}: nothing joins all devices", why=why, fix=f"add a [[tier]] with span = {world}")
    return tuple(tiers)


def _curve(name: str, raw: Any, path: str) -> tuple[tuple[float, float], ...]:
    """Returns the (size, rate) points of a curve, sorted by size."""
    try:
        points = tuple(sorted((float(size), float(rate)) for size, rate in raw))
    except (TypeError, ValueError):
        points = ()
    if not points or min(min(point) for point in points) <= 0:
        fix = "[[1e9, 2e14], [1e12, 7e14]]"
        raise UserError(
            f"{path}: curve {shown(name)} cannot be read", why="it is a list of [size, rate] above zero", fix=fix
        )
    return points


def _pair(raw: Any, path: str) -> tuple[int, int]:
    """Returns two whole numbers, or raises."""
    if not isinstance(raw, list) or len(raw) != 2 or not all(type(part) is int for part in raw):
        raise UserError(f"{path}: capability is {raw}", why="it is two whole numbers", fix="capability = [9, 0]")
    return raw[0], raw[1]


def _known(table: Mapping[str, Any], known: set[str], noun: str, path: str) -> None:
    for name in table:
        if name not in known:
            raise unknown(noun, name, known, path)


def _table(document: Mapping[str, Any], name: str, path: str) -> Mapping[str, Any]:
    value = document.get(name, {})
    if not isinstance(value, dict):
        raise UserError(f"{path}: {name} is {value!r}", why="it is a table", fix=f"write `[{name}]` and its keys below")
    return value


def _text(table: Mapping[str, Any], name: str, path: str) -> str:
    if not isinstance(table[name], str):
        raise UserError(f"{path}: {name} is {table[name]!r}", why="it is a text", fix=f'{name} = "..."')
    return str(table[name])


def write_toml(cluster: ClusterSpec, comments: tuple[str, ...] = (), machine: Mapping[str, Any] | None = None) -> str:
    """Returns the text of a file that reads back as `cluster`, with every number in it; `machine` is for people."""
    lines = [*(f"# {comment}" for comment in comments), "schema = 1", f"name = {shown(cluster.name)}"]
    lines += [f"nodes = {cluster.nodes}", f"per_node = {cluster.per_node}"]
    if cluster.price is not None:
        lines.append(f"price = {shown(cluster.price)}")
    if cluster.host_memory:
        lines.append(f"cpu_memory = {cluster.host_memory * cluster.per_node}")
    if machine:
        lines += ["", "[machine]", *(f"{name} = {shown(value)}" for name, value in machine.items())]
    lines += ["", "[device]"]
    for field in fields(Device):
        value = getattr(cluster.device, field.name)
        if field.name not in ("flops", "curves") and value != "":
            lines.append(f"{field.name} = {shown(value)}")
    lines.append(f"flops = {_inline(cluster.device.flops)}")
    if cluster.device.curves:
        lines += [
            "",
            "[device.curves]  # [size, rate reached]: FLOPs and FLOP/s, for elementwise bytes and bytes per second",
        ]
        lines += [f"{shown(name)} = {_points(curve)}" for name, curve in cluster.device.curves.items()]
    for tier in cluster.tiers:
        lines += ["", "[[tier]]", *(f"{field.name} = {shown(getattr(tier, field.name))}" for field in fields(Link))]
    if cluster.origins:
        lines += ["", "[origins]", *(f"{shown(name)} = {shown(origin)}" for name, origin in cluster.origins.items())]
    return "\n".join(lines) + "\n"


def _inline(numbers: Mapping[str, float]) -> str:
    return "{ " + ", ".join(f"{name} = {value:.6g}" for name, value in numbers.items()) + " }"


def _points(curve: tuple[tuple[float, float], ...]) -> str:
    return "[" + ", ".join(f"[{size:.5g}, {rate:.5g}]" for size, rate in curve) + "]"
