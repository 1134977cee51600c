"""`shardwise runs` lists the runs of a directory, oldest first or in another order."""

from __future__ import annotations

import argparse
import math
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.errors import Exit, UserError
from shardwise.terminal import is_live, make_console

if TYPE_CHECKING:
    from shardwise.run.rundir import RunDir

HELP = "List the runs of a directory with their state, progress, losses and date."
REPORTS = True
DEFAULT = "runs"

STATES = {"failed": "red", "unfinished": "yellow", "stopped": "yellow", "running": "green", "paused": "yellow"}
"""Colours of rows by the state of their run; finished ones have none."""

Row = dict[str, Any]


def _lowest(key: str) -> Callable[[Row], float]:
    """Returns a sort key: the smallest first, what is unknown or not finite last."""
    return lambda row: row[key] if row[key] is not None and math.isfinite(row[key]) else math.inf


SORTS: dict[str, Callable[[Row], Any]] = {
    "date": lambda row: row["started"],
    "name": lambda row: row["name"],
    "loss": _lowest("loss"),
    "held-out": _lowest("held_out_loss"),
    "speed": lambda row: -(row["tokens_per_s"] or 0.0),
}
"""Orders by their name: oldest, first in the alphabet, lowest loss, fastest first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", nargs="?", default=DEFAULT, help="where the runs are (default: runs)")
    parser.add_argument("--sort", choices=list(SORTS), default="date", help="which comes first (default: the oldest)")
    parser.add_argument("--reverse", action="store_true", help="in the opposite order")


def run(args: argparse.Namespace) -> int:
    from shardwise.run.rundir import all_runs, is_run, to_json

    _check(Path(args.dir), is_run(Path(args.dir)))
    rows = sorted([summary(found) for found in all_runs(args.dir)], key=SORTS[args.sort], reverse=args.reverse)
    if args.json:
        print(to_json({"schema": 1, "runs": rows}, indent=1))
        return Exit.DONE
    if not rows:
        print(f"no runs in {args.dir}; `shardwise train` starts one")
        return Exit.DONE
    width = max(len("run"), *(len(row["name"]) for row in rows))
    head = f"{'state':<10}  {'step':>9}  {'loss':>7}  {'held-out':>8}  {'tok/s':>7}  {'date':<16}"
    _say_row(f"{'run':<{width}}", head, "layout", "dim")
    for row in rows:
        step, date = (
            f"{row['step']}/{row['num_steps'] or '?'}",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(row["started"])),
        )
        loss, held_out = (f"{value:.4f}" if value is not None else "-" for value in (row["loss"], row["held_out_loss"]))
        rate = f"{row['tokens_per_s']:.0f}" if row["tokens_per_s"] is not None else "-"
        said = f"{row['state']:<10}  {step:>9}  {loss:>7}  {held_out:>8}  {rate:>7}  {date}"
        _say_row(f"{row['name']:<{width}}", said, row["layout"], STATES.get(row["state"], ""))
    return Exit.DONE


def _say_row(name: str, cells: str, layout: str, style: str) -> None:
    """Prints a row; on a terminal where the layout has no room beside it, it stands below, broken between words. The
    state, which comes first, has the style; of the head, which is dim, all."""
    if not is_live():
        print(f"{name}  {cells}  {layout}")
        return
    from rich.text import Text

    console, indent = make_console(), " " * (len(name) + 2)
    row = Text.assemble(name, "  ", cells)
    if style == "dim":
        row.stylize(style)
    else:
        row.stylize(style, len(indent), len(indent) + len("unfinished"))
    room = max(20, console.width - len(indent))
    if len(row) + 2 + len(layout) <= console.width:
        row.append(f"  {layout}", "dim" if style == "dim" else "")
        console.print(row, soft_wrap=True)
        return
    console.print(row, soft_wrap=True)
    for line in textwrap.wrap(layout, room, break_long_words=False, break_on_hyphens=False):
        console.print(Text(indent + line, style="dim"), soft_wrap=True)


def _check(folder: Path, is_itself_one: bool) -> None:
    if is_itself_one:
        why, fix = (
            "`runs` lists the runs in a directory",
            f"shardwise watch {folder}, or shardwise runs {folder.parent}",
        )
        raise UserError(f"{folder} is a run itself", why=why, fix=fix)
    if not folder.is_dir() and folder != Path(DEFAULT):
        why = "it is a file" if folder.exists() else "it does not exist"
        raise UserError(f"{folder} is no directory", why=why, fix="give the directory that the runs are in")


def summary(found: RunDir) -> Row:
    """Returns a run as `--json` has it; `started` is in seconds since 1970, losses are in nats per token."""
    steps, plan = found.steps(), found.read_plan()
    last = steps[max(steps)] if steps else {}
    begun = next((line["wall_time"] for line in found.lines() if "event" in line and line.get("wall_time")), None)
    return {
        "name": found.name,
        "path": str(found.path),
        "state": found.state(),
        "step": last.get("step", 0),
        "num_steps": plan.get("num_steps", 0),
        "loss": last.get("loss"),
        "held_out_loss": found.held_out_loss(),
        "tokens_per_s": last.get("tokens_per_s"),
        "started": begun if begun is not None else found.config.stat().st_mtime,
        "layout": plan.get("layout", "?"),
    }
