"""Tells of finished steps: metrics.jsonl, events, the terminal, and the history that the closing lines are made of.

A step is told when its numbers are here, which on a GPU is after the next one has been queued (loop.py). Invariant: steps are told in order,
each once, on every rank; what is collective here (`compared`) all ranks come to between the same two steps.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.data.loader import StepBatch
from shardwise.memory.usage import peak_bytes
from shardwise.plan.prediction.predict import Prediction
from shardwise.report import lines as report
from shardwise.report.predicted_and_measured import CHECK_AFTER
from shardwise.report.terminal import View
from shardwise.run.bubble_filling import Filler, side_seconds
from shardwise.run.clock import KINDS, Lap
from shardwise.run.events import Events
from shardwise.run.memory_watch import MemoryWatch
from shardwise.run.metrics import Metrics, expert_load
from shardwise.run.rundir import RunDir
from shardwise.run.step import StartedStep, StepResult
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan


@dataclass(frozen=True)
class Untold:
    """A step that has been started and not been told yet."""

    step: int
    started: StartedStep
    lap: Lap
    lr: float
    batch: StepBatch
    is_timed: bool  # nothing looked at it that takes time


@dataclass
class Teller:
    run: RunDir
    plan: Plan
    spec: ModelSpec
    device: torch.device
    prediction: Prediction
    peak_flops: float
    done: int  # steps of earlier processes
    view: View
    metrics: Metrics | None
    events: Events
    memory: MemoryWatch
    filler: Filler | None
    measured: dict[str, Any] | None = None  # after CHECK_AFTER steps, beside the prediction

    def __post_init__(self) -> None:
        self.history, self.last = report.History(), self.done

    def tell(self, it: Untold) -> StepResult:
        """Waits for the step."""
        step, result, parts = it.step, it.started.read(), it.lap.parts()
        line = self._line(it, result, parts)
        if self.filler:
            line["bubble_filled_s"] = side_seconds(it.lap.spans)
        self.history.add(line, timed=it.is_timed)
        self.events.record(step, it.lap)
        self.events.record_memory(step, self.memory.curve(step), it.lap.start)
        if self.metrics:
            self.events.record_experts(step, result.expert_tokens)
            self.metrics.write(line)
        self.view.step(line)
        side_line = self.filler.after_step(step, it.lap.spans, parts["step_s"]) if self.filler else None
        if self.metrics and side_line:
            self.metrics.write(side_line)
        if step == self.done + CHECK_AFTER:
            self.compare()
            if self.metrics and self.measured:
                report.compared(self.view, self.run, self.plan, self.prediction, self.measured)
        self.last = step
        return result

    def compare(self) -> None:
        """Collective."""
        self.measured = self.history.compared(self.prediction, self.memory, self.plan, self.device)

    def _line(self, it: Untold, result: StepResult, parts: dict[str, float]) -> dict[str, Any]:
        tokens_per_s = self.plan.tokens_per_step / parts["step_s"]
        line: dict[str, Any] = {
            "step": it.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": it.lr,
            "tokens": self.plan.tokens_per_step,
            "target_tokens": it.started.num_targets,
            "step_s": parts["step_s"],
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * self.spec.flops_per_token(self.plan.seq_len) / self.peak_flops,
            "peak_memory_bytes": peak_bytes(self.device),
            "wall_time": time.time(),
            **{f"{kind}_s": parts[f"{kind}_s"] for kind in (*KINDS, "other")},
        }
        if self.spec.num_experts:
            line |= {"aux_loss": result.aux_loss, "z_loss": result.z_loss, **expert_load(result.expert_tokens)}
        if self.plan.scales_loss:
            line["scale"] = result.scale
        if result.skipped:
            line["skipped"] = True
        return line


def is_finite(result: StepResult) -> bool:
    """A norm that is not would have made every weight of the update one that is not."""
    return math.isfinite(result.loss) and math.isfinite(result.grad_norm)
