"""Measures `Device.curves` and `Device.launch`: matmuls, attention and passes over memory by size. No torch here.

All devices are measured at once, or on a machine without cards all cores, a process with one thread on each: rates are
what a rank gets while the others are busy. Children measure (layer_rates.py), because a kernel that this machine cannot
run may end its process: that is then a finding. Read next: here.py, which makes a cluster of it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from shardwise.cluster.describe.machine import Machine
from shardwise.cluster.describe.table import SUSTAINED
from shardwise.cluster.measure.devices import why_it_ended
from shardwise.spec.cluster import ClusterSpec, Curve

CHILD_SECONDS = 100


@dataclass(frozen=True)
class LayerRates:
    """What the operations of a layer reach. `curves` are as Device has them; `problems` has the reason for each number
    format or measurement that does not work here."""

    devices: tuple[str, ...]
    curves: dict[str, Curve] = field(default_factory=dict)
    launch: float | None = None
    problems: dict[str, str] = field(default_factory=dict)


Found = dict[str, list[tuple[float, float]]]  # measurement -> (size, rate) of each device


def devices_of(machine: Machine) -> tuple[str, ...]:
    if machine.gpus:
        return tuple(f"cuda:{index}" for index in range(len(machine.gpus)))
    return ("cpu",) * machine.cores


def measure_layers(devices: Sequence[str]) -> LayerRates:
    """Returns what the operations of a layer reach on these devices. It takes about ten seconds; five more for a number
    format that does not work here."""
    found: Found = {}
    problems: dict[str, str] = {}
    while True:
        more, died = _one_round(devices, [*found, *problems])
        found |= {name: values for name, values in more.items() if len(values) == len(devices)}
        if died is None:
            break
        measurement, reason = died
        if measurement is None or not (found or more):  # nothing works
            problems["start"] = reason
            break
        problems[measurement.partition("#")[0].partition("/")[2] or measurement] = reason
    # Among cores the usual one counts; among cards the slowest, for which all others wait.
    choose = statistics.median if devices[0] == "cpu" else min
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    launch = None
    for measurement, values in found.items():
        name, rates = measurement.partition("#")[0], [value for _, value in values]
        if name == "launch":
            launch = statistics.median(rates)
        else:
            curves[name].append((values[0][0], choose(rates)))
    return LayerRates(
        tuple(devices), {name: tuple(sorted(points)) for name, points in curves.items()}, launch, problems
    )


def _one_round(devices: Sequence[str], skipped: Sequence[str]) -> tuple[Found, tuple[str | None, str] | None]:
    """Measures what is not in `skipped` and returns it. When a child died, it also returns the measurement that it was
    at, and why."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "shardwise.cluster.measure.layer_rates"]
    pipe: dict[str, Any] = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    children = [subprocess.Popen([*command, name, *skipped], env=environment, **pipe) for name in devices]
    watchdog = threading.Timer(CHILD_SECONDS, _end, [children])
    watchdog.start()
    try:
        for child in children:
            assert child.stdout is not None
            child.stdout.readline()  # it is ready, or gone
        for child in children:
            with suppress(BrokenPipeError):
                assert child.stdin is not None
                child.stdin.write("go\n")
                child.stdin.flush()
        outputs = [child.communicate() for child in children]
    finally:
        watchdog.cancel()
        _end(children)
    found: Found = defaultdict(list)
    died: tuple[str | None, str] | None = None
    for child, (text, errors) in zip(children, outputs, strict=True):
        running = None
        for line in text.splitlines():
            event = json.loads(line)
            if event["event"] == "start":
                running = event["measurement"]
            else:
                running = None
                found[event["measurement"]].append((event["size"], event["value"]))
        if child.returncode != 0:
            died = died or (running, why_it_ended(child.returncode, errors))
    return found, died


def _end(children: Sequence[subprocess.Popen[str]]) -> None:
    for child in children:
        if child.poll() is None:
            child.kill()
            child.wait()


def with_layers(cluster: ClusterSpec, rates: LayerRates) -> ClusterSpec:
    """Returns the cluster with the curves in it.

    For a core, matmuls say the peak, which no data sheet does. For a card, they only say what share of the peak it
    reaches: how fast a matmul is depends on its shape more than on its size (an odd vocabulary takes eight times as
    long), and the planner knows shapes.
    """
    device, matmuls = cluster.device, {}
    for name, curve in rates.curves.items():
        if name.startswith("matmul/"):
            matmuls[name.removeprefix("matmul/")] = max(rate for _, rate in curve)
    kept = {
        name: curve for name, curve in rates.curves.items() if device.kind == "cpu" or not name.startswith("matmul/")
    }
    device = replace(device, curves=MappingProxyType({**device.curves, **kept}))
    origins = {**cluster.origins, **dict.fromkeys(kept, "measured")}
    if rates.launch is not None:
        device, origins["launch"] = replace(device, launch=rates.launch), "measured"
    if device.kind == "cpu" and matmuls:
        device = replace(device, flops=MappingProxyType(matmuls), achievable=1.0)
        origins |= dict.fromkeys(("flops", "achievable"), "measured")
    elif "bf16" in matmuls and "bf16" in device.flops:
        share = matmuls["bf16"] / device.flops["bf16"] / SUSTAINED
        device, origins["achievable"] = replace(device, achievable=min(1.0, share)), "measured"
    if device.kind == "cpu" and (passes := rates.curves.get("elementwise")):
        device, origins["bandwidth"] = replace(device, bandwidth=passes[-1][1], bandwidth_share=1.0), "measured"
    return replace(cluster, device=device, origins=MappingProxyType(origins))
