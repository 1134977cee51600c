"""What it costs to know where a step went: steps with the clock and its events against the same steps without, in turn.

    python benchmarks/event_cost.py [--rounds 60] [--out FILE]

Two real ranks per layout. A round has four steps: one without a clock, one with it (every step of a run has that), one whose events
are written as well (one step in `run.events_every`, 10, has that), and one more without: A/A, the noise. Ratios are taken within a
round. Beside them stands the cost as a sum: spans of a step times the time of one span in a loop of nothing else, and a tenth of the time
that writing took, over the step. On a busy machine the ratios are mostly noise, the sum is not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from shardwise.model.presets import preset
from shardwise.plan.split import even_split
from shardwise.run.clock import Clock
from shardwise.run.events import Events
from shardwise.run.optimizer import build_optimizer
from shardwise.run.reference import Trial
from shardwise.run.step import run_step
from shardwise.run.trial import build_trial, trial_batch, trial_plan

CPU = torch.device("cpu")
EVERY = 10  # run.events_every
TRIAL = Trial(global_batch=16, micro_batch=4, seq_len=256, precision="fp32")
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2": {"dp": 2},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "tp=2 sp": {"tp": 2, "sequence": True},
    "pp=2": {"pp": 2},
}
KINDS = ("without", "clock", "events", "again without")


class NoClock(Clock):
    """Takes the place of a clock and notes nothing."""

    def span(self, *about: Any, **more: Any) -> Any:
        return nullcontext()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "model": "tiny, 4 micro-batches of 4 x 256 tokens (dp: 2)",
        "layouts": {},
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, layout in enumerate(LAYOUTS):
            meeting = Path(folder, f"meet-{number}")
            torch.multiprocessing.spawn(_rank, (layout, args.rounds, meeting), nprocs=2)
            row = report["layouts"][layout] = json.loads(meeting.with_suffix(".json").read_text())
            print(
                f"{layout:12} step {1e3 * row['step_s']:.1f} ms, {row['spans']} spans; over a step without: clock "
                f"{_shown(row['clock'])}, events {_shown(row['events'])}, noise {_shown(row['again without'])}; as a sum "
                f"{100 * row['cost_as_a_sum']:.3f} % of a step (bar 0.5 %)"
            )
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def _shown(ratio: dict[str, Any]) -> str:
    return f"{ratio['median']:.4f} ({ratio['quartiles'][0]:.4f} to {ratio['quartiles'][1]:.4f})"


def _rank(rank: int, layout: str, rounds: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    result = _measure(rank, layout, rounds, meeting.parent)
    if rank == 0:
        meeting.with_suffix(".json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def _measure(rank: int, layout: str, rounds: int, folder: Path) -> dict[str, Any]:
    spec, fields = preset("tiny"), dict(LAYOUTS[layout])
    if fields.get("pp", 1) > 1:
        fields["split"] = even_split(spec.num_layers, fields["pp"])
    plan = trial_plan(TRIAL, **fields)
    engine = build_trial(spec, plan, TRIAL, rank, CPU)
    optimizer = build_optimizer(TRIAL.optimizer, engine.locals())
    batch, num_targets = trial_batch(spec, plan, TRIAL, 1, engine.mesh.at.dp)
    events = Events(folder, rank, 1)
    clock, no_clock, writing = Clock(CPU), NoClock(CPU), 0.0
    seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    written = []
    for number in range(rounds + 3):
        for kind in KINDS[number % 4 :] + KINDS[: number % 4]:
            used = clock if kind in ("clock", "events") else no_clock
            dist.barrier()
            began = time.perf_counter()
            used.begin()
            run_step(engine, optimizer, batch, num_targets=num_targets, lr=1e-5, clip=1.0, clock=used)
            used.finish()
            ended = time.perf_counter()
            if kind == "events":
                events.record(number, clock)
                writing = time.perf_counter() - ended
                ended += writing
            seconds[kind].append(ended - began)
        written.append(writing)
    events.close()
    step_s, spans = statistics.median(seconds["without"][3:]), len(clock.spans)
    write_s, span_s = statistics.median(written[3:]), _span_seconds()
    ratios = {}
    for kind in KINDS[1:]:
        found = [a / b for a, b in zip(seconds[kind][3:], seconds["without"][3:], strict=True)]
        quartiles = statistics.quantiles(found, n=4)
        ratios[kind] = {"median": statistics.median(found), "quartiles": [quartiles[0], quartiles[2]]}
    cost = (spans * span_s + write_s / EVERY) / step_s
    return {"step_s": step_s, "spans": spans, "span_s": span_s, "write_s": write_s, "cost_as_a_sum": cost, **ratios}


def _span_seconds() -> float:
    """Of one span inside another, and its share of `finish`."""
    found = []
    for _ in range(20):
        clock = Clock(CPU)
        with clock.span("compute", "forward", 0, 0):
            began = time.perf_counter()
            for _ in range(1000):
                with clock.span("comm_exposed", "all-reduce", group="tp", num_bytes=1):
                    pass
        clock.finish()
        found.append((time.perf_counter() - began) / 1000)
    return statistics.median(found)


if __name__ == "__main__":
    main()
