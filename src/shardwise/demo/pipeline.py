"""Acts pipelines out: four ranks, one model, four schedules; the measured timeline under the simulated one.

The stages are real and compute real gradients, but the model is so small that its time would be noise. So each action
also sleeps for as long as a larger one would compute; sleeping ranks share cores without disturbing each other. Read
next: `spec/schedules.py`, `parallel/pipeline/execute.py`.
"""

from __future__ import annotations

import time
import weakref
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.demo.observe import CPU, SPEC, difference, truth_of
from shardwise.demo.ranks import Say
from shardwise.demo.story import Check, Story, drawing, on_the_wire, percent, same_as_one_process, table
from shardwise.demo.wire import Wire, of_kind, sent_bytes, total
from shardwise.parallel.data.replicas import DataParallelWrapper
from shardwise.parallel.pipeline.execute import Stage
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.spec.actions import NAMES, Action
from shardwise.spec.schedules import schedule_actions, stage_owners
from shardwise.spec.split import even_split
from shardwise.spec.timeline import Timed, Timeline, draw, peak_in_flight, simulate

WORLD = 4
NUM_MICRO = 8
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zero-bubble": 1, "zbv": 2}  # schedule -> stages per rank
UNIT_S = 0.020
UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}
MODEL = SPEC.with_overrides({"num_layers": 8})
ROWS, TOKENS = 2, 32
TRIAL = Trial(global_batch=NUM_MICRO * ROWS, micro_batch=ROWS, seq_len=TOKENS, precision="fp32")
EXACT = Trial(global_batch=4, micro_batch=1, seq_len=16, num_steps=1)
WIDTH = 84


def act(rank: int, world: int, say: Say) -> dict[str, Any]:
    truth = truth_of(EXACT, rank, MODEL)
    found = {}
    for schedule, virtual in SCHEDULES.items():
        layout = {
            "pp": world,
            "schedule": schedule,
            "virtual_stages": virtual,
            "split": even_split(MODEL.num_layers, world * virtual),
        }
        say(f"a step of {schedule}")
        found[schedule] = _step(rank, virtual, layout)
        say(f"comparison of {schedule} with one process")
        found[schedule]["difference"] = difference(EXACT, truth, rank, MODEL, **layout)
    return found


class Sleeping(DataParallelWrapper):
    """A stage that computes and then sleeps for the rest of its time. `held` counts micro-batches whose activations are
    alive."""

    def __init__(self, stage: Stage, held: LiveActivations):
        super().__init__(stage.model)
        self.unit_s = self.began = 0.0
        self.forward = self._forward  # type: ignore[assignment]
        stage.wrapper = self
        first: Any = next(iter(stage.model.layers.values()))
        first.feedforward.down.register_forward_pre_hook(lambda module, args: (_Hold.apply(args[0], held),))

    def _forward(self, *args: Any, **named: Any) -> Any:
        began = time.perf_counter()
        result = self.model(*args, **named)
        self._sleep("F", began)
        return result

    def before_backward(self, kind: str, *, last: bool) -> None:
        self.began = time.perf_counter()

    def after_backward(self, kind: str, *, last: bool) -> None:
        self._sleep(kind, time.perf_counter() if kind == "W" else self.began)

    def _sleep(self, kind: str, began: float) -> None:
        time.sleep(max(0.0, self.unit_s * UNITS[kind] - (time.perf_counter() - began)))


class LiveActivations:
    """Counts how many activations of a rank are alive, now and at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, change: int) -> None:
        self.now += change
        self.most = max(self.most, self.now)


class _Hold(torch.autograd.Function):
    """Returns its input once more, in memory whose end is noticed: the input of a matmul, which a stage keeps until its
    weights' gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: LiveActivations) -> Tensor:
        memory = np.empty(tuple(x.shape), dtype=np.float32)
        held.add(1)
        weakref.finalize(memory, held.add, -1)
        return torch.from_numpy(memory).copy_(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _step(rank: int, virtual: int, layout: dict[str, Any]) -> dict[str, Any]:
    plan = trial_plan(TRIAL, **layout)
    engine = build_trial(MODEL, plan, TRIAL, rank, CPU)
    held, wire, clock = LiveActivations(), Wire(), Clock(CPU)
    sleepers = [Sleeping(stage, held) for stage in engine.stages]
    batch, num_targets = trial_batch(MODEL, plan, TRIAL, 1, 0)
    dist.barrier()
    before = sent_bytes()
    with wire:  # counted without sleeping, timed without counting
        engine.pipeline.train(batch.microbatches, num_targets, clock)
    after, held.most = sent_bytes(), 0
    for sleeper in sleepers:
        sleeper.unit_s = UNIT_S / virtual
    dist.barrier()
    clock.begin()
    engine.pipeline.train(batch.microbatches, num_targets, clock)
    kinds = {name: kind for kind, name in NAMES.items()}
    sends = of_kind(wire.transfers, "send")
    return {
        "actions": [
            (kinds[s.name], s.stage, s.microbatch, clock.start + s.start_s, clock.start + s.start_s + s.duration_s)
            for s in clock.spans
            if s.name in kinds
        ],
        "held": held.most,
        "sends": len(sends),
        "send_bytes": total(sends),
        "sent": None if before is None or after is None else after - before,
    }


def make_story(found: list[dict[str, Any]]) -> Story:
    story = Story("pipeline", "Pipelines: 4 processes with two layers each, 8 micro-batches, four schedules")
    story.step(
        "Before: who has what",
        drawing(
            "gpipe, 1f1b, zero-bubble    rank 0: layers 0 1    rank 1: 2 3    rank 2: 4 5    rank 3: 6 7\n"
            "zbv, down and up again      rank 0: layers 0, 7   rank 1: 1, 6   rank 2: 2, 5   rank 3: 3, 4"
        ),
        f"A forward takes {1e3 * UNIT_S:.0f} ms, a backward twice that; zero-bubble and zbv split it into two halves, "
        "one towards the inputs, which the rank before waits for, and one for the weights, which nobody waits for. "
        "Stages of zbv take half of it all.",
    )
    timelines = {schedule: _timelines(schedule, [rank[schedule] for rank in found]) for schedule in SCHEDULES}
    longest = max(timeline.total for pair in timelines.values() for timeline in pair)
    parts: list[Any] = []
    for schedule, (simulated, measured) in timelines.items():
        for name, timeline in (("simulated", simulated), ("measured", measured)):
            head = f"{schedule}, {name}: {1e3 * timeline.total:.0f} ms, idle {percent(timeline.bubble_fraction)}"
            parts.append(drawing(f"{head}\n{draw(timeline, round(WIDTH * timeline.total / longest))}"))
        parts.append("")
    story.step(
        "What runs when: the plan, and the clock of the real processes (all on one scale)",
        "Digits are forwards of micro-batches, small letters their backwards (a belongs to 0), capital letters the "
        "half for the weights, dots are waiting.",
        *parts[:-1],
    )
    rows = []
    for schedule, (simulated, measured) in timelines.items():
        ranks = [rank[schedule] for rank in found]
        rows.append(
            [
                schedule,
                percent(simulated.bubble_fraction),
                percent(measured.bubble_fraction),
                f"{1e3 * simulated.total:.0f} ms",
                f"{1e3 * measured.total:.0f} ms",
                " ".join(str(rank["held"]) for rank in ranks),
                sum(r["sends"] for r in ranks),
            ]
        )
    story.step(
        "After: what each schedule costs",
        table(["", "idle planned", "measured", "step planned", "measured", "held, by rank", "sends"], rows),
        "Times are measured on this machine, as busy as it is now: they may exceed the plan, and are shown, not "
        "judged. Held: micro-batches whose activations are alive at once; those of zbv are half as large.",
    )
    for schedule in SCHEDULES:
        story.checks += _checks(schedule, [rank[schedule] for rank in found])
    largest = max(rank[schedule]["difference"] for rank in found for schedule in SCHEDULES)
    story.checks.append(same_as_one_process(largest, EXACT.num_steps))
    story.figures = {
        "microbatches": NUM_MICRO,
        "schedules": {
            schedule: {
                "bubble_simulated": simulated.bubble_fraction,
                "bubble_measured": measured.bubble_fraction,
                "step_s_simulated": simulated.total,
                "step_s_measured": measured.total,
                "ranks": [rank[schedule] for rank in found],
            }
            for schedule, (simulated, measured) in timelines.items()
        },
    }
    return story


def _timelines(schedule: str, ranks: list[dict[str, Any]]) -> tuple[Timeline, Timeline]:
    """Returns the timeline as planned, and as the clocks of the ranks say; they are one clock, that of the machine."""
    virtual = SCHEDULES[schedule]
    actions, owners = schedule_actions(schedule, WORLD, virtual, NUM_MICRO), stage_owners(schedule, WORLD, virtual)
    simulated = simulate(actions, owners, lambda action: UNIT_S * UNITS[action.kind] / virtual)
    first = min(rank["actions"][0][3] for rank in ranks)
    measured = Timeline(
        tuple(
            tuple(
                Timed(Action(kind, stage, micro), start - first, end - first)
                for kind, stage, micro, start, end in rank["actions"]
            )
            for rank in ranks
        )
    )
    return simulated, measured


def _checks(schedule: str, ranks: list[dict[str, Any]]) -> list[Check]:
    virtual, size = SCHEDULES[schedule], 4 * ROWS * TOKENS * MODEL.hidden
    table_of_actions = schedule_actions(schedule, WORLD, virtual, NUM_MICRO)
    ran = sum(
        [tuple(action[:3]) for action in rank["actions"]] == [tuple(action) for action in planned]
        for rank, planned in zip(ranks, table_of_actions, strict=True)
    )
    sends = 2 * NUM_MICRO * virtual * (WORLD - 1)
    formula, numbers = "2M(p-1)", f"2 x {NUM_MICRO} x 3"
    if virtual > 1:
        formula, numbers = "2M v(p-1)", f"2 x {NUM_MICRO} x {virtual} x 3"
    held = {"gpipe": ("M p", f"{NUM_MICRO} x 4"), "1f1b": ("p + ... + 1", "4 + 3 + 2 + 1")}.get(
        schedule, ("by its list", "")
    )
    return [
        Check(f"{schedule}: ranks that ran exactly their list of actions", "p", "", WORLD, ran),
        Check(f"{schedule}: sends between ranks", formula, numbers, sends, sum(rank["sends"] for rank in ranks)),
        Check(
            f"{schedule}: bytes of all sends",
            "sends x 4bsh",
            f"{sends} x {size:,}",
            sends * size,
            sum(rank["send_bytes"] for rank in ranks),
        ),
        Check(
            f"{schedule}: activations held, sum over ranks",
            *held,
            sum(peak_in_flight(table_of_actions)),
            sum(rank["held"] for rank in ranks),
        ),
        *on_the_wire(
            "bytes of all sends / p",
            f"{sends * size:,} / 4",
            sends * size / WORLD,
            [rank["sent"] for rank in ranks],
            f"{schedule}: ",
        ),
    ]
