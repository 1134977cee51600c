"""This is the one timer of measurements: how long an action takes on a device, and how long one takes that several
ranks do together.

What others do to this machine meanwhile is not its speed, so neither function returns a mean: of an action alone it is
the lower quartile, of a collective the least.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

Action = Callable[[], object]

SECONDS = {"cpu": 0.1, "cuda": 0.3}  # how long one measurement lasts
LONG = 2e-4  # seconds of an action that is longer than starting the three operations of a measurement
WARM_UP = 3  # collectives that open connections and fill caches
LARGE_BYTES = 2**22  # collectives from this size on are repeated less often


def seconds_of(action: Action, device: torch.device) -> float:
    """Returns the seconds of one call: the lower quartile of as many as fit in the time of a measurement, at least one,
    after one that warms up."""
    if device.type == "cuda":
        return _device_seconds(action, device)
    now = host_clock()
    action()
    times: list[float] = []
    while not times or (sum(times) < SECONDS["cpu"] and len(times) < 1000):
        start = now()
        action()
        times.append(now() - start)
    return lower_quartile(times)


def collective_seconds(action: Action, size: int, device: torch.device) -> float:
    """Collective. Returns the seconds of a collective of `size` bytes: the least of several, each begun by all ranks
    together."""
    times = []
    for _ in range(WARM_UP + (7 if size >= LARGE_BYTES else 20)):
        dist.barrier()
        start = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times[WARM_UP:])


def host_clock() -> Callable[[], float]:
    """Returns the clock to time the host with, in seconds: this thread's, not the wall's, where all of the computing is
    in this thread. What others on this machine take away is not this core's speed."""
    is_fine = time.get_clock_info("thread_time").resolution <= 1e-6 and torch.get_num_threads() == 1
    return time.thread_time if is_fine else time.perf_counter


def lower_quartile(times: list[float]) -> float:
    """Returns the value that a quarter of these are below."""
    return sorted(times)[len(times) // 4]


def _device_seconds(action: Action, device: torch.device) -> float:
    """Returns the seconds of one call on a GPU. A long action is timed at the end of a stretch of the same, when power
    limits have set the clock; a short one between events, with the device held up first, so that the host is ahead of
    it and starting is not measured."""

    def between(warm: int, count: int, held: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if held:
            torch.cuda._sleep(held)
        for number in range(warm + count):
            if number == warm:
                start.record()
            action()
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / count

    with torch.cuda.device(device):
        first = min(between(1, 1, 2_000_000) for _ in range(3))
        if first > LONG:
            count = max(1, int(SECONDS["cuda"] / 2 / first))
            return between(count, count, 0)
        return lower_quartile([between(1, 3, 2_000_000) for _ in range(20)])
