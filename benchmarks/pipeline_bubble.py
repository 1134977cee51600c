"""How long pipeline ranks really wait, against what the schedule says they must: measured bubble over predicted.

    python benchmarks/pipeline_bubble.py [--steps 30] [--out FILE]

The real executor, real processes, real sends and receives. Two kinds of stage: `tiny`'s own layers over two ranks, one
pinned core each; and stages that sleep instead of computing, for more ranks than this machine has cores. The prediction
is the simulator's, fed with what each action took in the same step, and with the time of one send between neighbours,
measured before. Both bubbles are shares of all ranks' time in a step, medians over steps; the simulator's without
sends stands beside them. What an action costs besides (bookkeeping, posting sends) is no bubble of the schedule,
but lengthens the step: it is the difference that remains.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shardwise.model.decoder import Hidden, Losses
from shardwise.parallel.data.replicas import DataParallelWrapper
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.spec.actions import Action
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schedules import stage_owners
from shardwise.spec.split import even_split
from shardwise.spec.timeline import simulate

NAMES = {"forward": "F", "backward": "B", "backward inputs": "I", "backward weights": "W"}
SECONDS = {"F": 0.040, "B": 0.080, "I": 0.040, "W": 0.040}  # of a sleeping stage with one layer's share
Case = tuple[int, str, int, int, str]
CASES: list[Case] = [
    # ranks, schedule, stages per rank, micro-batches, what a stage does
    (2, "gpipe", 1, 8, "compute"),
    (2, "1f1b", 1, 8, "compute"),
    (2, "interleaved", 2, 8, "compute"),
    (2, "zero-bubble", 1, 8, "compute"),
    (2, "zbv", 2, 8, "compute"),
    (4, "gpipe", 1, 8, "sleep"),
    (4, "1f1b", 1, 8, "sleep"),
    (4, "1f1b", 1, 3, "sleep"),
    (4, "interleaved", 2, 8, "sleep"),
    (4, "zero-bubble", 1, 8, "sleep"),
    (4, "zero-bubble", 2, 8, "sleep"),
    (4, "zbv", 2, 8, "sleep"),
]


class Sleeping(DataParallelWrapper):
    """A stage that takes its time and computes next to nothing."""

    def __init__(self, stage: Any, share: float):
        super().__init__(stage.model)
        self.share, self.is_last = share, stage.model.is_last
        self.weight = nn.Parameter(torch.ones(()))
        self.forward = self._forward  # type: ignore[assignment]

    def _forward(self, tokens: Tensor, targets: Tensor, documents_BT: Any = None, x_BTD: Tensor | None = None) -> Any:
        time.sleep(SECONDS["F"] * self.share)
        x = tokens.new_ones(*tokens.shape, self.model.spec.hidden, dtype=torch.float32) if x_BTD is None else x_BTD
        x = x * self.weight
        zero = x.new_zeros(())
        return Losses(x.sum(), zero, zero) if self.is_last else Hidden(x, zero, zero)

    def before_backward(self, kind: str, *, last: bool) -> None:
        time.sleep(SECONDS[kind] * self.share)

    def after_backward(self, kind: str, *, last: bool) -> None:
        if kind == "W":
            time.sleep(SECONDS["W"] * self.share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pipeline_bubble.json")
    args = parser.parse_args()
    rows = []
    for pp in sorted({case[0] for case in CASES}):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_rank, (pp, args.steps, folder), nprocs=pp)
            rows += json.loads((Path(folder) / "rows.json").read_text())
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average_before": os.getloadavg()[0],
        "steps": args.steps,
        "rows": rows,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    _show(rows)


def _rank(rank: int, pp: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", pp), rank=rank, world_size=pp)
    cores = sorted(os.sched_getaffinity(0))
    rows = []
    for case in (case for case in CASES if case[0] == pp):
        if rank == 0:
            print("measuring", *case, flush=True)
        os.sched_setaffinity(0, {cores[rank]} if case[-1] == "compute" and len(cores) >= pp else cores)
        rows.append(_case(rank, case, steps))
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _case(rank: int, case: Case, steps: int) -> dict[str, Any]:
    pp, schedule, virtual, num_microbatches, kind = case
    spec = preset("tiny").with_overrides({"num_layers": 8})
    rows = 2 if kind == "compute" else 1
    trial = Trial(global_batch=rows * num_microbatches, micro_batch=rows, seq_len=128, precision="fp32")
    split = even_split(spec.num_layers, pp * virtual)
    plan: Plan = trial_plan(trial, pp=pp, schedule=schedule, virtual_stages=virtual, split=split)
    engine = build_trial(spec, plan, trial, rank, torch.device("cpu"))
    if kind == "sleep":
        for stage in engine.stages:
            stage.wrapper = Sleeping(stage, 1 / virtual)
    batch, num_targets = trial_batch(spec, plan, trial, 1, 0)
    transfer = _send_seconds(rank, pp, (rows, trial.seq_len, spec.hidden))
    clock = Clock(torch.device("cpu"))
    seconds: list[dict[Action, float]] = []
    totals = []
    for _ in range(steps + 3):
        dist.barrier()
        clock.begin()
        began = time.perf_counter()
        engine.pipeline.train(batch.microbatches, num_targets, clock)
        totals.append(time.perf_counter() - began)
        engine.zero_grad()
        actions = [span for span in clock.spans if span.name in NAMES]
        seconds.append({Action(NAMES[s.name], s.stage, s.microbatch): s.duration_s for s in actions})
    gathered: list[Any] = [None] * pp
    dist.all_gather_object(gathered, (seconds[3:], totals[3:]))
    return _row(case, engine.pipeline.table, gathered, transfer)


def _send_seconds(rank: int, pp: int, shape: tuple[int, ...]) -> float:
    """Half of a round trip between neighbours, the median of all."""
    there, back, seconds = torch.zeros(shape), torch.zeros(shape), []
    for low in range(pp - 1):
        for _ in range(30):
            dist.barrier()
            if rank not in (low, low + 1):
                continue
            peer = low if rank == low + 1 else low + 1
            arriving = dist.irecv(back, peer)
            began = time.perf_counter()
            if rank == low:
                dist.isend(there, peer).wait()
                arriving.wait()
                seconds.append((time.perf_counter() - began) / 2)
            else:
                arriving.wait()
                dist.isend(there, peer).wait()
    gathered: list[Any] = [None] * pp
    dist.all_gather_object(gathered, seconds)
    return statistics.median(value for found in gathered for value in found)


def _row(case: Case, table: Any, gathered: list[Any], transfer: float) -> dict[str, Any]:
    """Every rank's step ends at its own last action, so the step is the slowest rank's."""
    pp, schedule, virtual, num_microbatches, kind = case
    owners = stage_owners(schedule, pp, virtual)
    steps = []
    for durations, totals in zip(*(zip(*part, strict=True) for part in zip(*gathered, strict=True)), strict=True):
        cost = {action: value for of_rank in durations for action, value in of_rank.items()}
        predicted = simulate(table, owners, cost.__getitem__, transfer)
        at_once = simulate(table, owners, cost.__getitem__)
        measured = 1 - sum(cost.values()) / (pp * max(totals))
        steps.append((predicted.total, max(totals), at_once.bubble_fraction, predicted.bubble_fraction, measured))
    medians = [statistics.median(values) for values in zip(*steps, strict=True)]
    return {
        "ranks": pp,
        "schedule": schedule,
        "virtual_stages": virtual,
        "micro_batches": num_microbatches,
        "stages": kind,
        "message_s": transfer,
        "predicted_step_s": medians[0],
        "measured_step_s": medians[1],
        "predicted_bubble_without_messages": medians[2],
        "predicted_bubble": medians[3],
        "measured_bubble": medians[4],
    }


def _show(rows: list[dict[str, Any]]) -> None:
    table = Table(title="pipeline bubble")
    for name in (
        "ranks",
        "schedule",
        "per rank",
        "micro",
        "stages",
        "step predicted",
        "measured",
        "ratio",
        "send",
        "bubble predicted",
        "measured",
        "ratio",
        "predicted without sends",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            str(row["ranks"]), row["schedule"], str(row["virtual_stages"]), str(row["micro_batches"]), row["stages"],
            f"{1e3 * row['predicted_step_s']:.1f} ms", f"{1e3 * row['measured_step_s']:.1f} ms",
            f"{row['measured_step_s'] / row['predicted_step_s']:.3f}",
            f"{1e3 * row['message_s']:.2f} ms",
            f"{100 * row['predicted_bubble']:.1f} %", f"{100 * row['measured_bubble']:.1f} %",
            f"{row['measured_bubble'] / row['predicted_bubble']:.2f}",
            f"{100 * row['predicted_bubble_without_messages']:.1f} %",
        )  # fmt: skip
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
