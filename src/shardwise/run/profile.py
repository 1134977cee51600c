"""Traces some steps (`run.profile = "10:13"`): one file per rank that ui.perfetto.dev and chrome://tracing read.

torch's profiler notes every operation on the CPU and every kernel on the GPU. The clock's spans stand above them as
ranges with their kinds and names, and each step as one range over all. Invariant: a run that traces nothing pays one
comparison per step and span.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.config.units import parse_steps
from shardwise.run.clock import Clock


class Profile:
    """Runs torch's profiler during the steps that are to be traced."""

    def __init__(self, steps: str | None, file: Path, clock: Clock, device: torch.device, say: Callable[[str], None]):
        self.steps = parse_steps(steps) if steps else range(0)
        self.file, self.clock, self.device, self.say = file, clock, device, say
        self.running: Any = None

    def ends_with(self, step: int) -> bool:
        """Returns whether this step is the last one to be traced."""
        return bool(self.steps) and step == self.steps[-1]

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Traces what runs inside, which is one step; does nothing for steps that are not traced."""
        if step not in self.steps:
            yield
            return
        if self.running is None:  # a resumed run may begin in the middle of them
            self._start()
        with record_function(f"step {step}"):
            yield

    def finish(self) -> None:
        """Writes the file. On a GPU this waits until the traced steps are through."""
        if self.running is None:
            return
        running, self.running, self.clock.mark = self.running, None, None
        running.stop()
        self.file.parent.mkdir(exist_ok=True)
        running.export_chrome_trace(str(self.file))
        self.say(f"trace    {self.file}, a file per rank; ui.perfetto.dev opens it and sends it nowhere")

    def _start(self) -> None:
        kinds = [ProfilerActivity.CPU]
        if self.device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(self.device)  # what earlier steps have queued is not these steps'
        else:
            os.environ.setdefault(
                "KINETO_LOG_LEVEL", "99"
            )  # it says on stderr when it starts and stops, and above 5 nothing
        self.running = profile(activities=kinds)
        self.running.start()
        self.clock.mark = record_function
        self.clock.begin()  # a profiler takes a while to start, which is not the step's time

    def __enter__(self) -> Profile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()  # stopped before the last of them
        elif self.running is not None:
            self.running.stop()
