"""Short measurements of this machine: matrix products, memory copies, the disk. Each takes well under a second.

Rates are medians of repeated runs on otherwise whatever the machine is doing now: they say what a run would get here and
today, not what the data sheet promises. Read next: link.py (the link between processes), cli/doctor.py (prints it all).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DISK_BYTES = 32 * 2**20


@dataclass(frozen=True)
class DeviceRates:
    """What one device reaches: FLOP/s per number format, and bytes per second read plus written by a copy."""

    device: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None
    flops_per_s: dict[str, float]
    copy_bytes_per_s: float


@dataclass(frozen=True)
class DiskRates:
    path: str
    free_bytes: int
    write_bytes_per_s: float | None
    problem: str | None = None


def measure_devices(cpu_name: str, cpu_memory: int) -> list[DeviceRates]:
    """The CPU, then every GPU that torch can use."""
    import torch

    found = [_measure(torch.device("cpu"), cpu_name, cpu_memory, None, side=1024)]
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(index)
        device = torch.device("cuda", index)
        found.append(_measure(device, about.name, about.total_memory, (about.major, about.minor), side=8192))
    return found


def _measure(
    device: torch.device, name: str, memory: int, capability: tuple[int, int] | None, side: int
) -> DeviceRates:
    import torch

    flops = {}
    for label, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        left = torch.randn(side, side, device=device, dtype=dtype)
        seconds = _median_seconds("left @ left", {"left": left})
        flops[label] = 2 * side**3 / seconds
    source = torch.zeros(16 * 2**20 if device.type == "cpu" else 256 * 2**20, device=device)
    seconds = _median_seconds("target.copy_(source)", {"source": source, "target": torch.empty_like(source)})
    return DeviceRates(str(device), name, memory, capability, flops, 2 * source.nbytes / seconds)


def _median_seconds(statement: str, names: dict[str, object]) -> float:
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer(statement, globals=names, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.2).median)


def measure_disk(folder: str | Path, size: int = DISK_BYTES) -> DiskRates:
    """Writes and flushes one small file where `folder` is, or would be; removes it again."""
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
