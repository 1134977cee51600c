"""Makes short measurements of this machine: matmuls, memory copies, the disk. Each takes well under a second.

Rates are medians of repeated runs beside whatever else the machine is doing: they say what a run would get here and
now, not what the data sheet promises. Devices are measured in a child process (device_rates.py), because a kernel that
this machine cannot run may end the process: that is then a finding, not a crash of ours. Read next: link.py.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

DISK_BYTES = 32 * 2**20
CHILD_SECONDS = 120


@dataclass
class DeviceRates:
    """What one device reaches: FLOP/s per number format, and bytes per second read plus written by a copy.

    `problems` holds, for each measurement that could not be made, the reason.
    """

    device: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    flops_per_s: dict[str, float] = field(default_factory=dict)
    copy_bytes_per_s: float | None = None
    problems: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DiskRates:
    """What a disk has free, in bytes, and how fast it is written, in bytes per second."""

    path: str
    free_bytes: int
    write_bytes_per_s: float | None
    problem: str | None = None


def measure_devices(cpu_name: str, cpu_memory: int) -> list[DeviceRates]:
    """Returns the rates of the CPU, then of every GPU that torch can use."""
    found: dict[str, DeviceRates] = {"cpu": DeviceRates("cpu", cpu_name, cpu_memory)}
    tried: set[str] = set()
    while True:
        running, reason = _one_child(found, tried)
        if running is None:
            if reason is not None:
                found["cpu"].problems.setdefault("start", reason)
            return list(found.values())
        # The child died inside this measurement: note it, and let another child do the rest.
        device, measurement = running.split("/")
        found[device].problems[measurement] = reason or "ended without a word"


def _one_child(found: dict[str, DeviceRates], tried: set[str]) -> tuple[str | None, str | None]:
    """Runs measurements not yet tried. Returns the one that was running when the child died, if it died, and why."""
    command = [sys.executable, "-m", "shardwise.cluster.measure.device_rates", *sorted(tried)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"no answer within {CHILD_SECONDS} s"
    running = None
    for line in done.stdout.splitlines():
        event = json.loads(line)
        name = event["device"]
        if event["event"] == "device":
            found.setdefault(name, DeviceRates(name, event["name"], event["memory_bytes"], tuple(event["capability"])))
        elif event["event"] == "start":
            running = f"{name}/{event['measurement']}"
            tried.add(running)
        else:
            running = None
            _store(found[name], event["measurement"], event["value"])
    if done.returncode == 0:
        return None, None
    return running, why_it_ended(done.returncode, done.stderr)


def _store(device: DeviceRates, measurement: str, value: float) -> None:
    if measurement == "copy":
        device.copy_bytes_per_s = value
    else:
        device.flops_per_s[measurement] = value


def why_it_ended(code: int, errors: str) -> str:
    if code < 0:
        return (signal.strsignal(-code) or f"signal {-code}").lower()
    return (errors.strip().splitlines() or [f"exit code {code}"])[-1]


def measure_disk(folder: str | Path, size: int = DISK_BYTES) -> DiskRates:
    """Returns how fast the disk is, by a small file that is written and flushed where `folder` is, or would be; removes
    it again."""
    place = Path(folder).absolute()
    while not place.is_dir():
        place = place.parent
    free = shutil.disk_usage(place).free
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            block = os.urandom(2**20)
            start = time.perf_counter()
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
    except OSError as problem:
        return DiskRates(str(place), free, None, problem.strerror or str(problem))
    return DiskRates(str(place), free, size / seconds)
