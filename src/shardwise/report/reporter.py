"""Listens to a run and reports it: metrics.jsonl, plan.json, events, the terminal.

A step is reported when its results are here, which on a GPU is after the next one has been queued (run/trainer.py).
Every rank has a reporter; only the first one's writes metrics and prints. Invariant: nothing here is collective.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

from shardwise.errors import Exit
from shardwise.memory.usage import peak_bytes
from shardwise.report.header import header_lines, matmul_lines
from shardwise.report.history import History
from shardwise.report.memory import memory_report
from shardwise.report.plan_file import write_plan
from shardwise.report.predicted_and_measured import compare, short_lines
from shardwise.report.summary import finished_lines, next_lines, stopped_lines, why_stopped
from shardwise.report.terminal import LiveView
from shardwise.report.utilization import peak_flops
from shardwise.run.bubble_filling import FilledBubbles
from shardwise.run.clock import KINDS
from shardwise.run.evaluate import perplexity
from shardwise.run.events import Events
from shardwise.run.going_back import Trouble, WayBack
from shardwise.run.guards import StopRequests
from shardwise.run.listener import Ending, FinishedStep, Listener
from shardwise.run.loggers import whole_config
from shardwise.run.measured_steps import MeasuredSteps
from shardwise.run.metrics import Metrics, expert_load
from shardwise.run.replica_check import Repair
from shardwise.run.session import Session
from shardwise.run.setup import Setup

Repeat = Callable[[Session, Mapping[int, float], float | None, int], tuple[dict[str, Any] | None, str | None]]
"""The signature of `prove.repeat.repeat_first_steps`: from a run's losses by step, the seconds of a usual step and the
peak bytes it returns the record of a proof and a line about it."""


class Reporter(Listener):
    """Reports one rank's part of a run. Used as a context, which closes its files and the live view."""

    def __init__(self, session: Session, stops: StopRequests, repeat: Repeat, view: LiveView | None = None):
        """`repeat` proves the run's first steps at its end."""
        self.session, self.stops, self.repeat, self.history = session, stops, repeat, History()
        self.unigram = session.corpus.unigram_entropy()
        self.view = view or LiveView(session.plan.num_steps, self.unigram, quiet=not session.ranks.is_first)
        self.metrics: Metrics | None = None  # of the first rank
        self.said_nothing_held_out = False
        self.comparison: dict[str, Any] | None = None  # predicted and measured, after the first steps
        self.is_right = True  # False: the run's proof found that it computed something else than one process would
        self._opened = ExitStack()

    def __enter__(self) -> Reporter:
        self._opened.enter_context(closing(self.view))
        return self

    def __exit__(self, *error: object) -> None:
        self._opened.close()

    def say(self, line: str) -> None:
        self.view.say(line)

    def started(self, setup: Setup) -> None:
        session, config, ranks = self.session, self.session.config, self.session.ranks
        self.setup, self.prediction = setup, setup.forecast.prediction
        is_frozen = config.adapter.kind != "none"
        self.peak_flops = peak_flops(session.plan.world, session.device, setup.forecast.cluster, is_frozen=is_frozen)
        stages = [stage.index for stage in setup.engine.stages]
        events = Events(session.run.events, ranks.rank, config.run.events_every, stages)
        self.events = self._opened.enter_context(closing(events))
        if not ranks.is_first:
            return
        write_plan(session.run, session.plan, self.prediction)
        self._say(header_lines(setup))
        settings = whole_config(config, session.plan.to_dict())
        metrics = Metrics(session.run, config.run, settings, self.say, setup.done, session.own.hear)
        self.metrics = self._opened.enter_context(closing(metrics))
        event = "resumed" if setup.done else "started"
        metrics.write({"event": event, "step": setup.done, "wall_time": time.time()})

    # Steps --------------------------------------------------------------------------------------------------------

    def step_started(self, step: int) -> None:
        if step == self.setup.done + 1:
            self._say(matmul_lines(self.session.plan))

    def step(self, finished: FinishedStep) -> None:
        line = self._line(finished)
        self.history.add(line, finished.is_timed)
        self.events.record(finished.step, finished.lap)
        self.events.record_memory(finished.step, finished.memory_curve, finished.lap.start)
        if self.metrics:
            self.events.record_experts(finished.step, finished.result.expert_tokens)
            self.metrics.write(line)
        self.view.step(line, finished.is_timed)
        if finished.result.skipped and not self.session.plan.scales_loss:
            self.say(f"skip     step {finished.step}: the gradients are not finite; no rank made the update")
        if self.metrics and finished.side_eval:
            self.metrics.write(finished.side_eval)
        if finished.measured:
            self._compare(finished.measured)
            self._report_comparison()

    def _line(self, finished: FinishedStep) -> dict[str, Any]:
        """Returns a step's line for metrics.jsonl."""
        plan, spec, result, parts = self.session.plan, self.session.spec, finished.result, finished.parts
        tokens_per_s = plan.tokens_per_step / parts["step_s"]
        line: dict[str, Any] = {
            "step": finished.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": finished.lr,
            "tokens": plan.tokens_per_step,
            "target_tokens": finished.num_targets,
            "step_s": parts["step_s"],
            "tokens_per_s": tokens_per_s,
            "mfu": tokens_per_s * spec.flops_per_token(plan.seq_len) / self.peak_flops,
            "peak_memory_bytes": peak_bytes(self.session.device),
            "wall_time": time.time(),
            **{f"{kind}_s": parts[f"{kind}_s"] for kind in (*KINDS, "other")},
        }
        if spec.num_experts:
            line |= {"aux_loss": result.aux_loss, "z_loss": result.z_loss, **expert_load(result.expert_tokens)}
        if plan.scales_loss:
            line["scale"] = result.scale
        if result.skipped:
            line["skipped"] = True
        if finished.filled_s is not None:
            line["bubble_filled_s"] = finished.filled_s
        return line

    def _compare(self, found: MeasuredSteps) -> None:
        held = None if found.memory is None else memory_report(self.prediction.memory, found.memory)
        self.comparison = compare(self.prediction, found.times, held, found.num_steps)

    def _report_comparison(self) -> None:
        if self.metrics and self.comparison:
            write_plan(self.session.run, self.session.plan, self.prediction, self.comparison)
            self._say(short_lines(self.comparison))

    def found(self, repairs: Sequence[Repair], spikes: Sequence[Trouble]) -> None:
        for one in repairs:
            about = {"step": one.step, "rank": one.rank, "host": one.host, "tensors": [*one.tensors]}
            if self.metrics:
                self.metrics.write({"event": "repaired", **about, "from_rank": one.source, "wall_time": time.time()})
            self.say(f"repaired step {one.step}: {one}")

        for spike in spikes:
            if self.metrics:
                about = {"step": spike.step, "why": spike.why, "wall_time": time.time()}
                self.metrics.write({"event": "spike", **about})
            self.say(f"spike    step {spike.step}: {spike.why} (run.on_spike)")

    def went_back(self, way: WayBack) -> None:
        trouble, passed = way.trouble, [*way.batches]
        about = {"why": trouble.why, "went_back_from": trouble.step, "passed_over": passed}
        self.history.forget_after(way.to)
        if self.metrics:
            self.metrics.write({"event": "resumed", "step": way.to, **about, "wall_time": time.time()})
        self.say(f"back     from step {trouble.step} to the checkpoint of step {way.to}: {trouble.why}")
        if passed:
            which = f"batch {passed[0]}" if len(passed) == 1 else f"batches {passed[0]} to {passed[-1]}"
            self.say(f"         {which} of the data passed over from now on, see {self.session.run.passed_over}")

    # Between steps ------------------------------------------------------------------------------------------------

    def evaluated(self, step: int, loss: float | None, own: Mapping[str, float]) -> None:
        if own:
            if self.metrics:
                self.metrics.write({"step": step, **own, "wall_time": time.time()})
            self.say(f"eval     step {step}: " + ", ".join(f"{name} {value:.4g}" for name, value in own.items()))
        if loss is None and own:
            return
        if loss is None:
            if not self.said_nothing_held_out:
                key = "data.validation_fraction" if self.session.own.corpus is None else "eval_data=..."
                self.say(f"eval     nothing is held out, so there is no evaluation loss ({key})")
            self.said_nothing_held_out = True
            return
        if self.metrics:
            self.metrics.write({"step": step, "eval_loss": loss, "wall_time": time.time()})
        self.say(f"eval     step {step}: held-out loss {loss:.3f}, perplexity {perplexity(loss):.2f}")

    def sampled(self, text: str | None) -> None:
        """Shows the text escaped, on one line."""
        if text is not None:
            self.say("sample   " + json.dumps(text, ensure_ascii=False))

    def filled(self, step: int, found: FilledBubbles | None) -> None:
        if found is None:
            self.say("fill     nothing is held out, so idle slots stayed empty (data.validation_fraction)")
            return
        if self.metrics:
            values = {"share": found.share, "batches": found.batches}
            self.metrics.write({"event": "bubble_filled", "step": step, **values, "wall_time": time.time()})
        self.say(f"fill     {_filled(found)}")

    def saved(self, step: int) -> None:
        if self.metrics and self.session.own.hear:
            self.session.own.hear({"event": "saved", "step": step, "wall_time": time.time()})

    # The end ------------------------------------------------------------------------------------------------------

    def stopped(self, ending: Ending) -> None:
        if self.metrics is None:
            return
        if ending.is_new and ending.measured:
            self._compare(ending.measured)
        self.view.close()  # what follows is the last word, below the live block
        event, why = why_stopped(ending)
        memory = self.comparison and self.comparison["memory"]
        about = {"event": event, "step": ending.step, "exit": int(ending.code), "why": why, "memory": memory}
        self.metrics.write({**about, "wall_time": time.time()})
        self._say(stopped_lines(self.session.run, ending))

    def finished(self, ending: Ending) -> None:
        if self.metrics is None:
            return
        if ending.is_new and ending.measured:
            self._compare(ending.measured)
        session, history = self.session, self.history
        proof = None
        if not self.stops.check():
            proof, line = self.repeat(session, history.losses, history.median_step_s(), ending.peak_bytes)
            self._say([line] if line else [])
        self.is_right = proof is None or proof["same"]
        self._say(finished_lines(history, self.prediction, self.unigram, ending.peak_bytes))
        self.metrics.write(
            {
                "event": "finished",
                "step": session.plan.num_steps,
                "exit": int(Exit.DONE if self.is_right else Exit.FOUND_WRONG),
                "loss": history.losses[max(history.losses)] if history.losses else None,
                "unigram_loss": self.unigram,
                "predicted": {"step_s": self.prediction.step_s, "memory_bytes": self.prediction.memory_bytes},
                "measured": {"step_s": history.median_step_s(), "memory_bytes": ending.peak_bytes},
                "memory": self.comparison and self.comparison["memory"],
                "parts": self.comparison and self.comparison["step"],
                "where": history.parts,
                "proof": proof,
                "wall_time": time.time(),
            }
        )
        if ending.is_new:
            self._report_comparison()
        self._say(next_lines(session.run, session.config, session.plan.num_steps, session.corpus.is_chat))

    def _say(self, lines: list[str]) -> None:
        for line in lines:
            self.say(line)


def _filled(found: FilledBubbles) -> str:
    """Returns, in words, how much of its idle time a run with `parallel.fill_bubbles` has used."""
    if not found.batches:
        return "0 % of the bubble: no held-out micro-batch gets through all stages in the idle slots of one step"
    text = f"filled {100 * found.share:.0f} % of the bubble with {found.batches:.3g} held-out batches"
    if found.newest and found.newest["eval_loss"] is not None:
        steps = f"steps {found.newest['first_step']}-{found.newest['step']}"
        text += f"; held-out loss {found.newest['eval_loss']:.3f} over {steps}"
    return text
