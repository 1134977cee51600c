"""Finds what this machine offers: cores, memory, GPUs. No torch, so planning can start before anything heavy is loaded.

Limits of containers count: a process held to 2 cores and 8 GiB by its control group has 2 cores and 8 GiB, whatever the
hardware is. Invariant: every number is what this process may use, never more. Read next: measure/devices.py, which
times what is only counted here.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shardwise.cluster.describe.usable import TorchBuild, torch_build, why_unusable

ROOT = Path("/")


@dataclass(frozen=True)
class Gpu:
    """A GPU that this process may use."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    peers: int | None = None  # how many other GPUs' memory it reaches without the CPU's; None: not asked


@dataclass(frozen=True)
class Machine:
    """What this process may use of its machine."""

    cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    platform: str
    gpu_problem: str = ""  # why GPUs that are here are not in `gpus`
    nodes: int = 1  # more than one: everything above is what equal nodes have together

    def times(self, nodes: int) -> Machine:
        """Returns so many machines like this one as one."""
        memory, gpus = nodes * self.memory_bytes, nodes * self.gpus
        return replace(self, cores=nodes * self.cores, memory_bytes=memory, gpus=gpus, nodes=nodes)


def this_machine() -> Machine:
    gpus, problem = find_gpus()
    return Machine(usable_cores(), usable_memory(), gpus, sys.platform, problem)


def usable_cores(root: Path = ROOT) -> int:
    """Returns how many cores this process may run on: its affinity mask, cut by the control group's quota (rounded
    up)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_quota(root)
    return max(1, min(cores, math.ceil(quota))) if quota is not None else cores


def usable_memory(root: Path = ROOT) -> int:
    """Returns the bytes of memory that this process may use: the machine's, cut by the control group's limit."""
    total = _physical_memory()
    limit = memory_limit(root)
    return min(total, limit) if limit is not None else total


def cpu_quota(root: Path = ROOT) -> float | None:
    """Returns the tightest CPU quota of our control groups, in cores; None when there is none."""
    quotas = []
    for folder in _cgroups(root, "cpu"):
        words = (_text(folder / "cpu.max") or "").split()
        if not words:  # version 1 keeps the two numbers in two files
            words = [_text(folder / "cpu.cfs_quota_us") or "", _text(folder / "cpu.cfs_period_us") or ""]
        if len(words) == 2 and words[0].isdigit() and words[1].isdigit() and int(words[1]) > 0:
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def memory_limit(root: Path = ROOT) -> int | None:
    """Returns the tightest memory limit of our control groups, in bytes; None when there is none."""
    limits = []
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(folder / name)
            if text is not None and text.isdigit() and int(text) < 2**60:  # version 1 says "none" as a huge number
                limits.append(int(text))
    return min(limits, default=None)


def cpu_model(root: Path = ROOT) -> str:
    """Returns the processor's name, as far as the system tells."""
    for line in (_text(root / "proc/cpuinfo") or "").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("model name", "Model", "cpu model"):
            return value.strip()
    if sys.platform == "darwin":
        answer = _output(["sysctl", "-n", "machdep.cpu.brand_string"])
        if answer:
            return answer
    return platform.processor() or platform.machine() or "unknown"


def find_gpus() -> tuple[tuple[Gpu, ...], str]:
    """Returns the NVIDIA GPUs that this process may use, in CUDA's order, honouring CUDA_VISIBLE_DEVICES as CUDA does;
    and why others cannot be used.

    A child process asks the driver: a process that has initialised CUDA cannot fork usable children, and ours may
    still have to.
    """
    has_driver = sys.platform == "win32" or any(
        (ROOT / place).exists() for place in ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/dxg")
    )
    if not has_driver or sys.platform == "darwin":
        return (), ""
    answer = _output([sys.executable, "-I", "-S", str(Path(__file__).with_name("ask_cuda.py"))])
    version = re.search(r"Module\s+([\d.]+)", _text(ROOT / "proc/driver/nvidia/version") or "")
    return read_gpus(answer or "", torch_build(), version[1] if version else "")


def read_gpus(answer: str, build: TorchBuild | None, driver: str = "") -> tuple[tuple[Gpu, ...], str]:
    """Returns the usable GPUs of what ask_cuda.py has said, for the torch that is installed, and why others cannot be
    used."""
    if not answer:
        return (), ""
    (word, *about), *lines = (line.split("\t") for line in answer.splitlines())
    if word == "error":
        name = f"the NVIDIA driver {driver}".strip()
        return (), f"{name} does not start: {about[1] or 'no reason given'} (error {about[0]})"
    gpus = tuple(
        Gpu(name, int(memory), (int(major), int(minor)), int(peers)) for memory, major, minor, peers, name in lines
    )
    why = why_unusable(build, (int(about[0]), int(about[1])), driver) if gpus else ""
    return ((), f"{len(gpus)} x {gpus[0].name} cannot be used: {why}") if why else (gpus, "")


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yields our control group for `controller` and every group above it: each may set a limit."""
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) != 3:
            continue
        _, controllers, path = parts
        if controllers == "":
            base = root / "sys/fs/cgroup"
        elif controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / controller
        else:
            continue
        # Inside a container the path may name the host's tree, which is not mounted: missing folders are skipped.
        inner = Path(path.lstrip("/"))
        yield from (base / folder for folder in (inner, *inner.parents))


def _physical_memory() -> int:
    """Returns the machine's memory in bytes."""
    if hasattr(os, "sysconf"):  # Linux and macOS
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return _windows_memory()


def _windows_memory() -> int:
    """Returns the machine's memory in bytes, as Windows says."""

    class MemoryStatus(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ulong), ("load", ctypes.c_ulong)] + [
            (name, ctypes.c_ulonglong)
            for name in ("total", "available", "page_total", "page_free", "virtual_total", "virtual_free", "extended")
        ]

    status = MemoryStatus()
    status.length = ctypes.sizeof(MemoryStatus)
    getattr(ctypes, "windll").kernel32.GlobalMemoryStatusEx(ctypes.byref(status))  # noqa: B009  (absent elsewhere)
    return int(status.total)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
