"""Says where a step's time went: spans of named kinds that add up to the step, on CPU by the wall clock, on CUDA by
device events.

    with clock.span("compute", "forward", microbatch=0): …      spans may stand inside each other
    parts = clock.finish()      # {"data_wait_s": …, "compute_s": …, …, "other_s": …}; the values sum to step_s

Invariant: every moment counts for the innermost span it lies in, so waiting inside a forward pass is not compute. Kind
"other" is for spans that are only recorded, not counted. On CUDA a span is what the current stream did between its
ends, and so is a step; no call but `Lap.parts` synchronises. Waiting for data happens on the host: it counts there as
far as the stream stood still for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from shardwise.run.heartbeat import Heartbeat

KINDS = ("data_wait", "compute", "comm_exposed", "bubble", "optimizer")


class Moment(NamedTuple):
    """A point in time, on the host and, on CUDA, on the device."""

    at_s: float  # seconds by the host's clock
    event: Any = None  # a CUDA event that the stream reaches at that time


@dataclass(slots=True, eq=False)
class Span:
    """A stretch of a step that is named and counted for one kind."""

    kind: str
    name: str
    start_s: float  # seconds since the step began
    duration_s: float  # seconds, with everything inside it
    microbatch: int | None = None
    stage: int | None = None
    group: str | None = None  # of ranks that communicate in it: dp, shard, tp, cp, ep, pp, world
    num_bytes: int | None = None
    parent: Span | None = None
    device_events: tuple[Any, Any] | None = None


class Lap(NamedTuple):
    """The time of one step, to be read when the device is through with it."""

    origin: Moment
    end: Moment
    spans: list[Span]

    @property
    def start(self) -> float:
        """The host's time, in seconds, at which the step began."""
        return self.origin.at_s

    def parts(self) -> dict[str, float]:
        """Returns the step's seconds by kind; they sum to its `step_s`. Waits for the device."""
        step_s = self.end.at_s - self.origin.at_s
        if self.end.event is not None:
            self.end.event.synchronize()
            step_s = self.origin.event.elapsed_time(self.end.event) / 1e3
        parts = dict.fromkeys((*KINDS, "other"), 0.0)
        for span in self.spans:
            if span.device_events:
                first, last = span.device_events
                span.start_s = self.origin.event.elapsed_time(first) / 1e3
                span.duration_s = first.elapsed_time(last) / 1e3
            parts[span.kind] += span.duration_s
            if span.parent is not None:
                parts[span.parent.kind] -= span.duration_s
        del parts["other"]  # it is what is left
        named = sum(parts.values())
        if named > step_s:  # a device's clock has ticks: keep the shares, fit the sum
            parts = {kind: seconds * step_s / named for kind, seconds in parts.items()}
            named = step_s
        result = {f"{kind}_s": seconds for kind, seconds in parts.items()}
        return {**result, "other_s": step_s - named, "step_s": step_s}


class Clock:
    """Collects the spans of a step."""

    mark: Callable[[str], AbstractContextManager[Any]] | None = None
    """Makes a named range in a profiler's trace (profile.py); None where nobody traces."""

    heartbeat: Heartbeat | None = None
    """Is told which span is open; None where nobody looks."""

    def __init__(self, device: torch.device):
        self.on_cuda = device.type == "cuda"
        self.begin()

    def begin(self) -> None:
        """Begins a step here: what was collected before is dropped."""
        self._begin_at(self.moment())

    def _begin_at(self, origin: Moment) -> None:
        self.spans: list[Span] = []
        self.open: list[Span] = []
        self.origin, self.start = origin, origin.at_s

    def moment(self) -> Moment:
        """Returns the present moment. On CUDA this queues an event and does not wait."""
        if not self.on_cuda:
            return Moment(time.perf_counter())
        import torch  # here, because `watch` reads verdicts without torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return Moment(time.perf_counter(), event)

    def span(
        self,
        kind: str,
        name: str,
        microbatch: int | None = None,
        stage: int | None = None,
        group: str | None = None,
        num_bytes: int | None = None,
    ) -> _Open:
        """Returns a context that is timed as a span. Inside another span it is about the same micro-batch and stage."""
        parent = self.open[-1] if self.open else None
        if parent is not None and microbatch is None:
            microbatch, stage = parent.microbatch, parent.stage
        return _Open(self, Span(kind, name, 0.0, 0.0, microbatch, stage, group, num_bytes, parent))

    def add(self, kind: str, name: str, start: Moment, end: Moment, **about: Any) -> None:
        """Adds a span that is over: it began and ended inside the one that is open now."""
        self.close(self.span(kind, name, **about).span, start, end)

    def close(self, span: Span, start: Moment, end: Moment) -> None:
        """Adds a span with the moments at which it began and ended."""
        span.start_s, span.duration_s = start.at_s - self.start, end.at_s - start.at_s
        if start.event is not None:
            span.device_events = start.event, end.event
        self.spans.append(span)

    def lap(self) -> Lap:
        """Returns the step that ends here; the next one begins here."""
        lap = Lap(self.origin, self.moment(), self.spans)
        self._begin_at(lap.end)
        return lap

    def finish(self) -> dict[str, float]:
        """Returns the seconds by kind since `begin`. Waits for the device."""
        return Lap(self.origin, self.moment(), self.spans).parts()


class _Open:
    """A span that is open between `with` and its end."""

    __slots__ = ("clock", "mark", "span", "start")

    def __init__(self, clock: Clock, span: Span):
        self.clock, self.span = clock, span
        self.mark = clock.mark and clock.mark(_title(span))

    def __enter__(self) -> Span:
        if self.mark:
            self.mark.__enter__()
        self.clock.open.append(self.span)
        if self.clock.heartbeat:
            self.clock.heartbeat.opened(self.span)
        self.start = self.clock.moment()
        return self.span

    def __exit__(self, *trouble: object) -> None:
        end = self.clock.moment()
        if self.mark:
            self.mark.__exit__(None, None, None)
        self.clock.open.pop()
        if self.clock.heartbeat:
            self.clock.heartbeat.closed(self.span.parent)
        self.clock.close(self.span, self.start, end)


def _title(span: Span) -> str:
    """Returns a span's title in a trace, such as `compute: forward, micro-batch 0, stage 1`."""
    about = {"micro-batch": span.microbatch, "stage": span.stage, "over": span.group}
    return ", ".join([f"{span.kind}: {span.name}", *(f"{word} {of}" for word, of in about.items() if of is not None)])


def verdict(parts: dict[str, float]) -> str:
    """Returns one plain sentence on where the time went, from summed parts."""
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
