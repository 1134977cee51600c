"""What it costs a pipeline to evaluate in its idle slots, and how much of them it uses: `parallel.fill_bubbles =
"eval"`.

    python benchmarks/pipefill.py [--rounds 8] [--out FILE]

The real executor, processes, sends and filler; stages sleep instead of computing (`pipeline_bubble.py`), so that
four of them do not share a core. Filled and plain steps take turns, each pair in another order; the ratio is of their
medians, and that of the fastest of each beside it, which other jobs on the machine disturb less. A held-out forward
sleeps as long as one of training. The possible share is the simulator's with the same times: slots before a held-out
micro-batch can have come through the stages before cannot be used. Where nothing fits, filled and plain steps are the
same lists: their ratio is the noise.
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
from pipeline_bubble import SECONDS, Sleeping
from rich.console import Console
from rich.table import Table

from shardwise.parallel.pipeline.idle_slots import fill_bubbles
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.bubble_filling import FIRST_ROUND, HEADROOM, LONGER, PLAIN_STEPS, SEND_S, BubbleFiller
from shardwise.run.clock import Clock
from shardwise.spec.presets import preset
from shardwise.spec.split import even_split
from shardwise.spec.timeline import simulate

TARGET = 1.03
RANKS, MICRO_BATCHES = 4, 8
CASES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zbv", 2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8, help="pairs of a filled and a plain step, per schedule")
    parser.add_argument("--schedules", nargs="+", default=[schedule for schedule, _ in CASES])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "pipefill.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (args.rounds, args.schedules, folder), nprocs=RANKS)
        rows = json.loads((Path(folder) / "rows.json").read_text())
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": os.getloadavg()[0],
        "rounds": args.rounds,
        "target": TARGET,
        "rows": rows,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    table = Table(title=f"idle slots that evaluate: {RANKS} ranks, {MICRO_BATCHES} micro-batches, sleeping stages")
    for name in (
        "schedule",
        "plain step",
        "filled step",
        "ratio",
        "of the fastest",
        "target",
        "per step",
        "bubble filled",
        "possible",
    ):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["schedule"],
            f"{1e3 * row['plain_s']:.0f} ms",
            f"{1e3 * row['filled_s']:.0f} ms",
            f"{row['ratio']:.3f}",
            f"{row['ratio_of_fastest']:.3f}",
            f"{TARGET:.2f}",
            f"{row['held_out_per_step']} micro-batches",
            f"{100 * row['share']:.0f} %",
            f"{100 * row['possible_share']:.0f} %",
        )
    Console(width=130).print(table)


def _rank(rank: int, rounds: int, schedules: list[str], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    rows = []
    for schedule, virtual in (case for case in CASES if case[0] in schedules):
        if rank == 0:
            print("measuring", schedule, flush=True)
        rows.append(_case(rank, schedule, virtual, rounds))
    if rank == 0:
        (Path(folder) / "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _case(rank: int, schedule: str, virtual: int, rounds: int) -> dict[str, Any]:
    spec = preset("tiny").with_overrides({"num_layers": 8})
    trial = Trial(global_batch=MICRO_BATCHES, micro_batch=1, seq_len=128, precision="fp32")
    split = even_split(spec.num_layers, RANKS * virtual)
    plan = trial_plan(trial, pp=RANKS, schedule=schedule, virtual_stages=virtual, split=split)
    engine = build_trial(spec, plan, trial, rank, torch.device("cpu"))
    for stage in engine.stages:
        stage.wrapper = Sleeping(stage, 1 / virtual)
    batch, num_targets = trial_batch(spec, plan, trial, 1, 0)
    filler = BubbleFiller(engine, lambda number: batch.microbatches, num_batches=8)
    clock = Clock(torch.device("cpu"))

    def step(fill: bool) -> float:
        """Seconds until all ranks are through."""
        dist.barrier()
        clock.begin()
        if fill:
            filler.before_step()
        engine.pipeline.train(batch.microbatches, num_targets, clock)
        dist.barrier()
        seconds = clock.finish()["step_s"]
        engine.zero_grad()
        if fill:
            filler.after_step(1, clock.spans, seconds)
        return seconds

    for _ in range(1 + PLAIN_STEPS + 1):  # warm up, measure, plan and fill once
        step(True)
    assert rounds < FIRST_ROUND, "the filler would look again at plain steps"
    plain, filled = [], []
    for number in range(rounds):
        for fill in (True, False) if number % 2 else (False, True):
            (filled if fill else plain).append(step(fill))
    assert filler.side is not None
    found = filler.result()
    table, owners = engine.pipeline.table, engine.pipeline.owners
    price = {**SECONDS, "E": HEADROOM * SECONDS["F"]}
    possible = fill_bubbles(
        table, owners, lambda action: price[action.kind] / virtual, MICRO_BATCHES * 8, SEND_S, LONGER
    )[1]
    bubble = sum(simulate(table, owners, lambda action: price[action.kind] / virtual).bubble)
    return {
        "schedule": schedule,
        "virtual_stages": virtual,
        "plain_s": statistics.median(plain),
        "filled_s": statistics.median(filled),
        "ratio": statistics.median(filled) / statistics.median(plain),
        "ratio_of_fastest": min(filled) / min(plain),
        "ratio_quartiles": statistics.quantiles([a / b for a, b in zip(filled, plain, strict=True)], n=4)[::2],
        "held_out_per_step": len(filler.side.microbatches),
        "share": found.share,
        "possible_share": possible * len(owners) * SECONDS["F"] / virtual / bubble,
    }


if __name__ == "__main__":
    main()
