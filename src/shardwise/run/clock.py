"""Where a step went: spans of named kinds that add up to the step, on CPU by the wall clock, on CUDA by device events.

    with clock.span("compute", "forward", microbatch=0): …
    parts = clock.finish()      # {"data_wait_s": …, "compute_s": …, …, "other_s": …}; the values sum to step_s

Waiting for data happens on the host, so that kind is always measured there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

KINDS = ("data_wait", "compute", "comm_exposed", "bubble", "optimizer")


@dataclass
class Span:
    kind: str
    name: str
    start_s: float  # since the step began, on the host
    duration_s: float
    microbatch: int | None = None
    stage: int | None = None
    bytes: int | None = None
    device_events: tuple[Any, Any] | None = None


class Clock:
    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        self.spans: list[Span] = []
        self.start = time.perf_counter()

    @contextmanager
    def span(self, kind: str, name: str, microbatch: int | None = None, stage: int | None = None) -> Iterator[Span]:
        began = time.perf_counter()
        span = Span(kind, name, began - self.start, 0.0, microbatch, stage)
        if self.on_cuda and kind != "data_wait":
            import torch  # here, because `watch` reads verdicts without torch

            span.device_events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            span.device_events[0].record()
        yield span
        if span.device_events:
            span.device_events[1].record()
        span.duration_s = time.perf_counter() - began
        self.spans.append(span)

    def move(self, seconds: float, kind: str, name: str, num_bytes: int | None = None) -> None:
        """Say that the last `seconds` of the newest span were really another kind (waiting for the network, say)."""
        newest = self.spans[-1]
        seconds = min(seconds, newest.duration_s)
        newest.duration_s -= seconds
        start = newest.start_s + newest.duration_s
        self.spans.append(Span(kind, name, start, seconds, newest.microbatch, newest.stage, num_bytes))

    def finish(self) -> dict[str, float]:
        """Seconds by kind. Call it after the step's results have been read, so that device work is complete."""
        step_s = time.perf_counter() - self.start
        parts = dict.fromkeys(KINDS, 0.0)
        for span in self.spans:
            if span.device_events:
                span.duration_s = span.device_events[0].elapsed_time(span.device_events[1]) / 1e3
            parts[span.kind] += span.duration_s
        named = sum(parts.values())
        if named > step_s:  # device time of work queued in the step before: keep the shares, fit the sum
            parts = {kind: seconds * step_s / named for kind, seconds in parts.items()}
            named = step_s
        result = {f"{kind}_s": seconds for kind, seconds in parts.items()}
        return {**result, "other_s": step_s - named, "step_s": step_s}


def verdict(parts: dict[str, float]) -> str:
    """One plain sentence on where the time went, from summed parts."""
    total = max(parts["step_s"], 1e-12)
    share = {kind: parts[f"{kind}_s"] / total for kind in (*KINDS, "other")}
    percent = {kind: f"{100 * value:.0f} %" for kind, value in share.items()}
    if share["data_wait"] > 0.1:
        return f"input-bound: {percent['data_wait']} waiting for data; more GPUs will not help"
    if share["bubble"] > 0.2:
        return (
            f"pipeline-bound: {percent['bubble']} waiting for other stages, {percent['compute']} in the model; "
            f"more micro-batches or another parallel.schedule help"
        )
    if share["comm_exposed"] > 0.25:
        return f"network-bound: {percent['comm_exposed']} waiting for other ranks; larger batches or fewer ranks help"
    if share["optimizer"] > 0.3:
        return f"optimizer-bound: {percent['optimizer']} updating weights; more tokens per step help"
    if share["other"] > 0.15:
        return f"overhead: {percent['other']} outside the model; larger micro-batches help"
    return (
        f"compute-bound: {percent['compute']} in the model, {percent['comm_exposed']} waiting for other ranks, "
        f"{percent['optimizer']} optimizer, {percent['data_wait']} data"
    )
