"""`shardwise runs` lists the runs of a directory, oldest first."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit

if TYPE_CHECKING:
    from shardwise.run.rundir import RunDir

HELP = "List the runs of a directory with their state, progress and loss."
REPORTS = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", nargs="?", default="runs", help="where the runs are (default: runs)")


def run(args: argparse.Namespace) -> int:
    from shardwise.run.rundir import all_runs, to_json

    rows = [summary(found) for found in all_runs(args.dir)]
    if args.json:
        print(to_json({"schema": 1, "runs": rows}, indent=1))
        return Exit.DONE
    if not rows:
        print(f"no runs in {args.dir}; `shardwise train` starts one")
        return Exit.DONE
    width = max(len("run"), *(len(row["name"]) for row in rows))
    print(f"{'run':<{width}}  {'state':<10}  {'step':>11}  {'loss':>8}  {'tok/s':>8}  layout")
    for row in rows:
        step = f"{row['step']}/{row['num_steps']}"
        loss = f"{row['loss']:.4f}" if row["loss"] is not None else "-"
        rate = f"{row['tokens_per_s']:.0f}" if row["tokens_per_s"] is not None else "-"
        print(f"{row['name']:<{width}}  {row['state']:<10}  {step:>11}  {loss:>8}  {rate:>8}  {row['layout']}")
    return Exit.DONE


def summary(found: RunDir) -> dict[str, Any]:
    steps, plan = found.steps(), found.read_plan()
    last = steps[max(steps)] if steps else {}
    return {
        "name": found.name,
        "path": str(found.path),
        "state": found.state(),
        "step": last.get("step", 0),
        "num_steps": plan.get("num_steps", 0),
        "loss": last.get("loss"),
        "tokens_per_s": last.get("tokens_per_s"),
        "layout": plan.get("layout", "?"),
    }
