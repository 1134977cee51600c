"""This is the stop-watch of what a run measures on its own device: kernels to choose from, blocks, stages, optimizers.

One statistic: the median over turns. It does not move when one turn meets another process, a page fault or a clock that
changes, and unlike the best of several it says what a typical turn of a step takes. Things that are compared take
turns, so that what slows the device down slows all of them alike. (Children that measure a machine for `doctor` have a
timer of their own, cluster/measure/timer.py, because they run without this room.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

MOST_TURNS = 50


def median_seconds(
    actions: Sequence[Callable[[], object]],
    device: torch.device,
    *,
    turns: int,
    calls: int = 1,
    untimed: int = 0,
    budget_s: float = 0.0,
) -> list[float]:
    """Returns the seconds of one call of each action on the device: the median over `turns`, in which each action is
    called `calls` times.

    calls      between two looks at the clock nothing waits for the device: in a step the host is ahead, so what it
               takes to start a kernel does not count
    untimed    calls at the beginning of each turn of an action, for caches that the other actions have emptied
    budget_s   more turns than `turns` where they fit into so many seconds, up to 50
    Each action is called once before all turns: that call compiles, allocates and loads.
    """
    for action in actions:
        action()
    found: list[list[float]] = [[] for _ in actions]
    ends = time.perf_counter() + budget_s
    while len(found[0]) < turns or (time.perf_counter() < ends and len(found[0]) < MOST_TURNS):
        for action, times in zip(actions, found, strict=True):
            times.append(_seconds(action, device, calls, untimed))
    return [median(times) for times in found]


def _seconds(action: Callable[[], object], device: torch.device, calls: int, untimed: int) -> float:
    """Returns the seconds of one call: between two events on a GPU, by the wall clock on a CPU. The GPU is still busy
    with the untimed calls when the clock starts, so that it never waits for the host to start a kernel."""
    if device.type != "cuda":
        for _ in range(untimed):
            action()
        began = time.perf_counter()
        for _ in range(calls):
            action()
        return (time.perf_counter() - began) / calls
    torch.cuda.synchronize(device)
    stream = torch.cuda.current_stream(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(untimed):
        action()
    start.record(stream)
    for _ in range(calls):
        action()
    end.record(stream)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / calls
