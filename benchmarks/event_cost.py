"""What it costs to know where a step went: the clock of every step, and the events of one step in ten.

    python benchmarks/event_cost.py [--seconds 12] [--out FILE]

`tiny` with the default run's batch, in one process and on two real ranks. Two figures per layout, on rank 0:

1. Counted. Every call into the recording code (opening and closing a span, two moments around what torch waits for,
   summing up, writing the events) is timed from outside, and the times of a step are added. Cost = clock + events / 10,
   step by step: wall time over the step's wall time, and seconds of the processor over the step's. Waiting, for another
   rank or for a core of a busy machine, is in neither side of the second, and the timers themselves are inside it:
   rather too much than too little. It is what the target of 0.5 % is held against.
2. Compared. Steps without any clock and steps with clock *and* events, in turn, in the same run: a sampled step over
   one without, by the wall clock and by seconds of the processor, with 95 % of the median and an A/A. It also sees what
   no timer is around, and the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from shardwise.optim.build import build_optimizer
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.events import Events
from shardwise.run.step import run_step
from shardwise.spec.presets import preset
from shardwise.spec.split import even_split

CPU = torch.device("cpu")
EVERY = 10  # run.events_every
TARGET = 0.005
COUNTED_SHARE = 0.25  # of the time; then steps are compared
TRIAL = Trial(global_batch=8, micro_batch=4, seq_len=128, precision="fp32")
LAYOUTS: dict[str, dict[str, Any]] = {"one process": {}, "dp=2 zero=3": {"dp": 2, "zero": 3}, "pp=2": {"pp": 2}}


class NoClock(Clock):
    """Takes the place of a clock and notes nothing."""

    def begin(self) -> None:
        self.open = []

    def moment(self) -> Any:
        return None

    def span(self, *about: Any, **more: Any) -> Any:
        return nullcontext()


class CountedClock(Clock):
    """A clock that knows how long it was busy itself."""

    spent_ns = spent_cpu_ns = 0
    is_inside = False

    def counted(self, call: Callable[..., Any], *about: Any, **more: Any) -> Any:
        if self.is_inside:  # the outermost call counts, with all it calls
            return call(*about, **more)
        self.is_inside = True
        began_cpu, began = time.thread_time_ns(), time.perf_counter_ns()
        result = call(*about, **more)
        self.spent_ns += time.perf_counter_ns() - began
        self.spent_cpu_ns += time.thread_time_ns() - began_cpu
        self.is_inside = False
        return result

    def span(self, *about: Any, **more: Any) -> Any:
        opened = self.counted(super().span, *about, **more)
        return opened if self.is_inside else _Counted(self, opened)

    def moment(self) -> Any:
        return self.counted(super().moment)

    def add(self, *about: Any, **more: Any) -> None:
        self.counted(super().add, *about, **more)

    def begin(self) -> None:
        self.counted(super().begin)

    def finish(self) -> dict[str, float]:
        return self.counted(super().finish)


class _Counted:
    def __init__(self, clock: CountedClock, opened: Any):
        self.clock, self.opened = clock, opened

    def __enter__(self) -> Any:
        return self.clock.counted(self.opened.__enter__)

    def __exit__(self, *trouble: object) -> None:
        self.clock.counted(self.opened.__exit__, *trouble)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12, help="of steps, per layout")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "model": f"tiny, {TRIAL.global_batch} x {TRIAL.seq_len} tokens",
        "target": TARGET,
        "layouts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, layout in enumerate(LAYOUTS):
            meeting = Path(folder, f"meet-{number}")
            world = 1 if layout == "one process" else 2
            torch.multiprocessing.spawn(_rank, (world, layout, args.seconds, meeting), nprocs=world)
            row = report["layouts"][layout] = json.loads(meeting.with_suffix(".json").read_text())
            cost, wall, cpu = row["cost_processor"], row["sampled_over_without"], row["sampled_over_without_processor"]
            print(
                f"{layout:12} step {1e3 * row['step_s']:.1f} ms, {row['spans']} spans, clock {row['clock_us']:.0f} us, "
                "events "
                f"{row['events_us']:.0f} us: {_percent(cost)} of a step's processor time, "
                f"{_percent(row['cost'])} of its wall time, target {100 * TARGET} %: "
                f"{'holds' if row['holds'] else 'MISSED'}\n"
                f"{'':12} compared: a sampled step takes {_percent(wall)} more, of the processor {_percent(cpu)}; "
                f"A/A {_percent(row['noise'])}, {_percent(row['noise_processor'])} ({row['pairs']} pairs)",
                flush=True,
            )
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def _percent(found: dict[str, float]) -> str:
    return f"{100 * found['median']:.3f} % ({100 * found['low']:.3f} to {100 * found['high']:.3f})"


def _rank(rank: int, world: int, layout: str, seconds: float, meeting: Path) -> None:
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    result = _measure(rank, layout, seconds, meeting.parent)
    if rank == 0:
        meeting.with_suffix(".json").write_text(json.dumps(result))
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


def _measure(rank: int, layout: str, seconds: float, folder: Path) -> dict[str, Any]:
    spec, fields = preset("tiny"), dict(LAYOUTS[layout])
    if fields.get("pp", 1) > 1:
        fields["split"] = even_split(spec.num_layers, fields["pp"])
    plan = trial_plan(TRIAL, **fields)
    engine = build_trial(spec, plan, TRIAL, rank, CPU)
    optimizer = build_optimizer(TRIAL.optimizer, engine.locals())
    batch, num_targets = trial_batch(spec, plan, TRIAL, 1, engine.mesh.at.dp)
    events = Events(folder, rank, 1, [stage.index for stage in engine.stages])

    def step(clock: Clock) -> tuple[float, float, float, float]:
        """Seconds of a step with its recording, and of the processor; seconds of writing events, and of the
        processor."""
        if plan.world > 1:
            dist.barrier()
        began, began_cpu, wrote, wrote_cpu = time.perf_counter(), time.process_time(), 0.0, 0.0
        clock.begin()
        run_step(engine, optimizer, batch, num_targets=num_targets, lr=1e-5, clip=1.0, clock=clock)
        if not isinstance(clock, NoClock):
            clock.finish()
            ended_cpu, ended = time.thread_time(), time.perf_counter()
            events.record(1, clock)
            wrote, wrote_cpu = time.perf_counter() - ended, time.thread_time() - ended_cpu
        return time.perf_counter() - began, time.process_time() - began_cpu, wrote, wrote_cpu

    without, with_events, counted = NoClock(CPU), Clock(CPU), CountedClock(CPU)
    for clock in (with_events, without):
        step(clock)
    begun = time.perf_counter()

    def goes_on(number: int, at_least: int, share: float) -> bool:
        """Rank 0's word, between steps: not too few, and then until this share of the time is over."""
        answer = torch.tensor(number < at_least or time.perf_counter() - begun < share * seconds)
        if plan.world > 1:
            dist.broadcast(answer, 0)
        return bool(answer)

    # 1. Counted.
    steps, shares, shares_cpu, clocks, writes = [], [], [], [], []
    while goes_on(len(shares), 12, COUNTED_SHARE):
        counted.spent_ns = counted.spent_cpu_ns = 0
        taken, taken_cpu, wrote, wrote_cpu = step(counted)
        steps.append(taken - wrote)
        clocks.append(counted.spent_ns / 1e9)
        writes.append(wrote)
        shares.append((clocks[-1] + wrote / EVERY) / steps[-1])
        shares_cpu.append((counted.spent_cpu_ns / 1e9 + wrote_cpu / EVERY) / (taken_cpu - wrote_cpu))

    # 2. Compared: two steps without and one with, each in every place.
    found: dict[str, list[float]] = {"on": [], "on cpu": [], "again": [], "again cpu": []}
    while goes_on(number := len(found["on"]), 4, 1.0):
        order = ("off", "on", "again")[number % 3 :] + ("off", "on", "again")[: number % 3]
        taken_by = {kind: step(with_events if kind == "on" else without) for kind in order}
        for kind in ("on", "again"):
            found[kind].append(taken_by[kind][0] / taken_by["off"][0] - 1)
            found[f"{kind} cpu"].append(taken_by[kind][1] / taken_by["off"][1] - 1)
    events.close()
    cost = _median(shares_cpu)
    return {
        "step_s": statistics.median(steps),
        "spans": len(counted.spans),
        "clock_us": 1e6 * statistics.median(clocks),
        "events_us": 1e6 * statistics.median(writes),
        "counted_steps": len(shares),
        "cost": _median(shares),
        "cost_processor": cost,
        "holds": cost["high"] < TARGET,
        "pairs": len(found["on"]),
        "sampled_over_without": _median(found["on"]),
        "sampled_over_without_processor": _median(found["on cpu"]),
        "noise": _median(found["again"]),
        "noise_processor": _median(found["again cpu"]),
    }


def _median(values: list[float]) -> dict[str, float]:
    """With the two values between which the true median lies in 95 of 100 cases (order statistics)."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    low, high = int(len(ordered) / 2 - half), int(len(ordered) / 2 + half)
    return {
        "median": statistics.median(ordered),
        "low": ordered[max(low, 0)],
        "high": ordered[min(high, len(ordered) - 1)],
    }


if __name__ == "__main__":
    main()
