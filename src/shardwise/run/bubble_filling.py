"""Evaluates held-out batches in the idle slots of a pipeline (`parallel.fill_bubbles`): bubble filling, beside training
and without a trace in it.

A few plain steps tell how long each action takes; all ranks agree on these times and put the same held-out forwards
into the slots that are left (parallel/pipeline/idle_slots.py). After some filled steps come plain ones again: new
times, and a comparison. If filled steps were more than 3 % longer, half as many forwards are placed from then on.

A micro-batch passes all stages within one step, so it was evaluated with the weights that its step began with. A pass
over the held-out batches may take several steps: its loss is then one of a model that moved from `first_step` to
`step`, which the line in metrics.jsonl says.

Invariant: training never reads anything of this. What is decided here is decided from numbers that all ranks have in
common.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from shardwise.data.loader import TensorBatch, cut_microbatches, to_tensors
from shardwise.data.sequences import IGNORE, Sequences
from shardwise.parallel.engine import Engine
from shardwise.parallel.pipeline.execute import LAST_SENDS, Side
from shardwise.parallel.pipeline.idle_slots import fill_bubbles
from shardwise.run.clock import Span
from shardwise.run.evaluate import EVAL_ROWS, held_out_batch, num_held_out
from shardwise.spec.actions import NAMES, Action

PLAIN_STEPS = 3  # steps without filling that are timed before a round of filled ones
FIRST_ROUND, LONGEST_ROUND = 12, 192  # filled steps of a round
SLOWER = 1.03  # filled steps that are this much longer than plain ones make the next round fill less
HEADROOM = 1.05  # held-out forwards are taken to be this much longer than measured
LONGER = 1.01  # how much longer the simulator may find a filled step
SEND_S = 1e-3  # seconds from the end of a forward pass until the next stage can begin with it

_KIND_OF = {name: kind for kind, name in NAMES.items()}
ReadBatch = Callable[[int], Sequence[TensorBatch]]
"""This rank's micro-batches of a held-out batch; batches are numbered from 0."""


@dataclass(frozen=True)
class FilledBubbles:
    """What a whole run got out of its idle time, over all ranks."""

    share: float  # of the bubble time of filled steps, 0 to 1
    batches: float  # global held-out batches that were evaluated
    newest: dict[str, Any] | None  # the metrics line of the newest complete pass over the held-out batches


class BubbleFiller:
    """Decides which idle slots evaluate what. Collective: every rank makes one and calls it in every step."""

    def __init__(self, engine: Engine, read: ReadBatch, num_batches: int):
        self.engine, self.plan, self.mesh = engine, engine.plan, engine.mesh
        self.num_batches, self.in_pass = num_batches, num_batches * engine.plan.num_microbatches
        self.coming = self._endless(read)
        self.table, self.num_filled, self.most = engine.pipeline.table, 0, self.in_pass
        self.flat = [action for mine in self.table for action in mine]
        self.round = FIRST_ROUND // 2  # doubled when the first one is planned
        self.warm = False
        self.plain: list[dict[Action, float]] = []  # seconds of each action, for each plain step
        self.plain_s: list[float] = []  # seconds of each plain step
        self.filled_s: list[float] = []  # seconds of each filled step of this round
        self.round_s: list[float] = []  # those of the round before
        self.forward_s: dict[int, list[float]] = {}  # seconds of held-out forwards, by stage
        self.side: Side | None = None
        # A pass over the held-out batches, and the whole run.
        self.first_step, self.done, self.sums = 0, 0, torch.zeros(2, dtype=torch.float64)
        self.newest: dict[str, Any] | None = None
        self.totals: list[float] = []  # seconds that this rank was in the pipeline, for each filled step
        self.busy_s = self.side_s = 0.0

    def before_step(self) -> None:
        self.side = None
        if len(self.plain) < PLAIN_STEPS:
            return
        if not self.filled_s:
            self._plan_slots()
        micro = [next(self.coming).to(self.mesh.device) for _ in range(self.num_filled)]
        self.side = Side(self.table, micro, torch.zeros(len(micro), dtype=torch.float64, device=self.mesh.device))
        self.engine.pipeline.side = self.side

    def after_step(self, step: int, spans: Sequence[Span], step_s: float) -> dict[str, Any] | None:
        """Takes in a finished step; call it after `clock.finish`. Returns a line for metrics.jsonl when a pass over the
        held-out batches is complete, else None."""
        seconds = action_seconds(spans)
        if self.side is None:
            if self.warm:
                self.plain.append(seconds)
                self.plain_s = [*self.plain_s, step_s][-2 * PLAIN_STEPS :]  # before and after a round
            self.warm = True
            return None
        self.filled_s.append(step_s)
        self.totals.append(_pipeline_s(spans))
        for action, value in seconds.items():
            if action.kind == "E":
                self.forward_s.setdefault(action.stage, []).append(value)
                self.side_s += value
            else:
                self.busy_s += value
        if len(self.filled_s) >= self.round:
            self.plain, self.round_s, self.filled_s = [], self.filled_s, []  # look again how long things take
        return self._count(step, self.side)

    def result(self) -> FilledBubbles:
        """Collective. Returns what filling has brought. The bubble is the time that the ranks' actions leave idle until
        the slowest rank is through."""
        steps = torch.tensor(self.totals, dtype=torch.float64)
        sums = torch.tensor([self.busy_s, self.side_s], dtype=torch.float64)
        if len(steps):
            dist.all_reduce(steps, op=dist.ReduceOp.MAX)
        dist.all_reduce(sums)
        busy_s, side_s = sums.tolist()
        bubble_s = self.plan.world * float(steps.sum()) - busy_s
        share = side_s / bubble_s if bubble_s > 0 else 0.0
        return FilledBubbles(share, self.done / self.plan.num_microbatches, self.newest)

    # Slots --------------------------------------------------------------------------------------------------------

    def _plan_slots(self) -> None:
        """Turns what this rank has measured into lists of actions that are the same on every rank."""
        mine = {action: median(step[action] for step in self.plain) for action in self.plain[0]}
        sent = [mine.get(action, 0.0) for action in self.flat]
        sent += [median(self.forward_s.get(stage, [0.0])) for stage in range(self.plan.num_stages)]
        is_first = self.mesh.rank == 0  # one rank's steps, of both kinds
        sent += [median(found) if found and is_first else 0.0 for found in (self.plain_s, self.round_s)]
        agreed = torch.tensor(sent, dtype=torch.float64)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        *times, plain_s, filled_s = agreed.tolist()
        if self.num_filled and filled_s > SLOWER * plain_s:
            self.most = self.num_filled // 2
        self.round = min(2 * self.round, LONGEST_ROUND)
        seconds = dict(zip(self.flat, times, strict=False))
        forwards = [
            measured or max(seconds[Action("F", stage, micro)] for micro in range(self.plan.num_microbatches))
            for stage, measured in enumerate(times[len(self.flat) :])
        ]
        self.table, self.num_filled = fill_bubbles(
            self.engine.pipeline.table,
            self.engine.pipeline.owners,
            lambda action: HEADROOM * forwards[action.stage] if action.kind == "E" else seconds[action],
            self.most,
            SEND_S,
            LONGER,
        )
        self.forward_s = {}

    # Held-out batches ---------------------------------------------------------------------------------------------

    def _endless(self, read: ReadBatch) -> Iterator[TensorBatch]:
        while True:
            for number in range(self.num_batches):
                yield from read(number)

    def _count(self, step: int, side: Side) -> dict[str, Any] | None:
        """Adds what a step has evaluated to the pass it belongs to, and returns the metrics line of a pass that it
        completes. `most` keeps a step from reaching over two ends."""
        line = None
        for micro, loss in zip(side.microbatches, side.losses.tolist(), strict=True):
            if self.done % self.in_pass == 0:
                self.first_step, self.sums = step, torch.zeros(2, dtype=torch.float64)
            self.sums[0] += loss if self.mesh.counts_loss else 0.0
            self.sums[1] += int((micro.targets != IGNORE).sum()) if self.mesh.counts_targets else 0
            self.done += 1
            if self.done % self.in_pass == 0:
                dist.all_reduce(self.sums)
                total, count = self.sums.tolist()
                line = self.newest = {
                    "event": "side_eval",
                    "step": step,
                    "first_step": self.first_step,
                    "eval_loss": total / count if count else None,
                    "batches": self.num_batches,
                    "wall_time": time.time(),
                }
        return line


def action_seconds(spans: Sequence[Span]) -> dict[Action, float]:
    """Returns how many seconds each action of a step took, without waits for other stages. What followed from an action
    before the next one (completing gradients, say) counts for it."""
    seconds: dict[Action, float] = {}
    current = None
    for span in spans:
        if span.name == LAST_SENDS:
            break
        if span.name in _KIND_OF:
            assert span.stage is not None and span.microbatch is not None, span
            current = Action(_KIND_OF[span.name], span.stage, span.microbatch)
            seconds[current] = span.duration_s
        elif span.kind != "bubble" and current is not None:
            seconds[current] += span.duration_s
    return seconds


def side_seconds(spans: Sequence[Span]) -> float:
    return sum(span.duration_s for span in spans if span.name == NAMES["E"])


def _pipeline_s(spans: Sequence[Span]) -> float:
    """Returns the seconds from a step's first wait or action to its last receive."""
    first = next(span for span in spans if span.microbatch is not None)
    last = next(span for span in spans if span.name == LAST_SENDS)
    return last.start_s + last.duration_s - first.start_s


def held_out_filler(engine: Engine, sequences: Sequences, max_batches: int) -> BubbleFiller | None:
    """Returns a filler with the batches that `evaluate` takes; None if nothing is held out."""
    plan, num_rows = engine.plan, num_held_out(sequences, EVAL_ROWS * max_batches)

    def read(number: int) -> list[TensorBatch]:
        batch = held_out_batch(sequences, number, plan.rows(engine.mesh.at.dp), plan.global_batch, num_rows)
        return cut_microbatches(to_tensors(batch), plan.micro_batch, plan.num_microbatches, same_shape=True)

    return BubbleFiller(engine, read, -(-num_rows // plan.global_batch)) if num_rows else None
