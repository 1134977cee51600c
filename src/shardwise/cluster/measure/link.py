"""Measures the link between processes in the alpha-beta model: sending S bytes takes alpha + beta * S seconds.

Two local processes time real all-reduces of several sizes (collective_rank.py); here the line is fitted. An all-reduce
over two ranks is two sends of S/2 in a row, so its line has intercept 2 * alpha and slope beta. Invariant: processes
started here are gone when `measure_local_link` returns, and they only ever listen on the loopback interface.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SIZES = (4, 4096, 65536, 2**20, 2**22, 2**24)


@dataclass(frozen=True)
class LinkFit:
    """Seconds per send and per byte; `points` are the measured (bytes, seconds) of all-reduces over two ranks."""

    alpha_s: float
    beta_s_per_byte: float
    points: tuple[tuple[int, float], ...]

    @property
    def bytes_per_s(self) -> float:
        return 1 / self.beta_s_per_byte if self.beta_s_per_byte > 0 else float("inf")

    @property
    def largest_error(self) -> float:
        """How far the line is from the worst measured point, as a share of it."""
        return max(abs(2 * self.alpha_s + self.beta_s_per_byte * size - took) / took for size, took in self.points)


class LinkNotMeasured(Exception):
    """Is raised when the two processes did not come back with times; the message says what they said."""


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns intercept and slope of y = a + b * x by least squares of the *relative* errors, neither below zero.

    Times span four orders of magnitude. Plain least squares would fit the longest alone and leave the intercept,
    which is what short sends cost, to chance.
    """
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    mean_x = sum(w * x for w, (x, _) in zip(weights, points)) / total
    mean_y = sum(w * y for w, (_, y) in zip(weights, points)) / total
    spread = sum(w * (x - mean_x) ** 2 for w, (x, _) in zip(weights, points))
    slope = sum(w * (x - mean_x) * (y - mean_y) for w, (x, y) in zip(weights, points)) / spread if spread else 0.0
    slope = max(0.0, slope)
    intercept = mean_y - slope * mean_x
    if intercept < 0:  # then the best line with a >= 0 goes through the origin
        weighted = sum(w * x * x for w, (x, _) in zip(weights, points))
        return 0.0, sum(w * x * y for w, (x, y) in zip(weights, points)) / weighted
    return intercept, slope


def loopback_interface() -> str | None:
    """Returns the name of the loopback interface: `lo` on Linux, `lo0` on macOS; None where interfaces have other
    names."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except (AttributeError, OSError):
        return None
    return next((name for name in ("lo", "lo0") if name in names), None)


def measure_local_link(sizes: Sequence[int] = SIZES, timeout_s: float = 60.0) -> LinkFit:
    """Starts two processes, lets them all-reduce over gloo, and returns the fitted line. It takes about the time of
    importing torch."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if interface := loopback_interface():
        environment["GLOO_SOCKET_IFNAME"] = interface  # gloo's own variable: listen there and nowhere else
    with tempfile.TemporaryDirectory(prefix="shardwise-link-") as folder:
        # A file as meeting place: no port is opened for it, and it works on every platform.
        store = str(Path(folder) / "store")
        words = ["2", ",".join(map(str, sizes)), "all-reduce"]
        arguments = [[store, "gloo", str(rank), *words] for rank in (0, 1)]
        answer = run_ranks("shardwise.cluster.measure.collective_rank", arguments, environment, timeout_s)
    points = tuple((size, seconds) for _, _, size, seconds in json.loads(answer))
    intercept, slope = fit_line(points)
    return LinkFit(intercept / 2, slope, points)


def run_ranks(module: str, arguments: Sequence[Sequence[str]], environment: dict[str, str], timeout_s: float) -> str:
    """Runs one process per entry of `arguments` and returns what the first of them printed. None is left when this
    returns."""
    pipe: dict[str, Any] = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([sys.executable, "-m", module, *words], **pipe) for words in arguments]
    try:
        outputs = [rank.communicate(timeout=timeout_s) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise LinkNotMeasured(f"no answer within {timeout_s:.0f} s") from None
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        if rank.returncode != 0:
            raise LinkNotMeasured((errors.strip().splitlines() or [f"exit code {rank.returncode}"])[-1])
    return str(outputs[0][0])
