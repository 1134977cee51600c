"""The clock of a rehearsed step: it tells the recorder which action is under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.rehearse.stand_in import Recorder
from shardwise.run.clock import Clock, Moment, Span


class RehearsalClock(Clock):
    """The clock that a step is given anyway; here it tells the recorder which action is under way."""

    def __init__(self, recorder: Recorder):
        self.recorder = recorder
        self.follow: Callable[[Span], None] = lambda span: None  # is told of every action that begins
        super().__init__(torch.device("cpu"))

    def span(self, kind: str, *about: Any, **more: Any) -> Any:
        opened = super().span(kind, *about, **more)
        if kind in ("compute", "optimizer"):
            self.recorder.during = describe(opened.span)
            self.follow(opened.span)
        return opened

    def close(self, span: Span, start: Moment, end: Moment) -> None:
        super().close(span, start, end)
        if span.kind in ("compute", "optimizer"):
            self.recorder.action_ends()


def describe(span: Span) -> str:
    """Returns an action in words, such as `forward, micro-batch 3, stage 1`."""
    about = {"micro-batch": span.microbatch, "stage": span.stage}
    return ", ".join([span.name, *(f"{word} {of}" for word, of in about.items() if of is not None)])
