"""`shardwise watch` follows a run from another terminal; it reads the run directory and never touches the run."""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from shardwise.errors import Exit
from shardwise.terminal import is_live, say

if TYPE_CHECKING:
    from shardwise.run.rundir import RunDir

HELP = "Follow a run in the terminal until it ends; after a failure, show the verdict."
REPORTS = True
Drawn = TypeVar("Drawn")
POLL_S = 0.5
WIDTH = 80  # characters of a picture, without what stands beside it
BESIDE = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory, a name, or `last`")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")
    parser.add_argument("--once", action="store_true", help="print the present state and leave")


def run(args: argparse.Namespace) -> int:
    from shardwise.run.rundir import find_run, to_json

    found = find_run(args.run, args.runs)
    if args.json:
        print(to_json({"schema": 1, **_snapshot(found)}, indent=1))
        return Exit.DONE
    if args.once or not found.is_locked():
        _print_state(found)
        return Exit.DONE
    return _follow(found)


def _snapshot(found: RunDir) -> dict[str, Any]:
    from shardwise.cli.runs import summary
    from shardwise.report.memory import measured_memory
    from shardwise.report.step_breakdown import measured_pipeline, seconds_by_kind

    steps = found.steps()
    ran, curve = _drawn(lambda: measured_pipeline(found)), _drawn(lambda: measured_memory(found))
    return {
        **summary(found),
        "last": steps[max(steps)] if steps else None,
        "where": seconds_by_kind(list(steps.values())),
        "pipeline": ran and ran.summary(),
        "memory": curve and curve.summary(),
        "compared": found.read_plan().get("measured"),
        "event": found.last_event(),
    }  # fmt: skip


def _width() -> int:
    """Returns the width of pictures: on a terminal their lines are not broken."""
    return min(WIDTH, max(20, shutil.get_terminal_size().columns - BESIDE)) if is_live() else WIDTH


def _drawn(draw: Callable[[], Drawn]) -> Drawn | None:
    """Returns what `draw` makes of plan.json and the events; None where they are missing or damaged: nothing depends on
    a picture."""
    try:
        return draw()
    except (AttributeError, LookupError, OSError, TypeError, ValueError):
        return None


def _follow(found: RunDir) -> int:
    """Prints new lines as they appear, and returns the exit code; on a terminal one block that is drawn anew."""
    from shardwise.report.memory import measured_memory
    from shardwise.report.step_breakdown import bar, measured_pipeline, seconds_by_kind
    from shardwise.report.terminal import LiveView

    view = LiveView(found.read_plan().get("num_steps", 1), None)
    seen, curve = 0, None
    try:
        while True:
            running = found.is_locked()
            steps = list(found.steps().values())
            if len(steps) > seen:
                ran = _drawn(lambda: measured_pipeline(found))
                curve = curve or _drawn(lambda: measured_memory(found))  # drawn once: only the first steps are watched
                pictures = [part.text(_width()) for part in (ran, curve) if part]
                view.below = "\n".join([bar(seconds_by_kind(steps)), *pictures])
            for line in steps[seen:]:
                view.step(line)
            seen = len(steps)
            if not running:
                break
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        view.close()
        say("watch    left; the run goes on")
        return Exit.DONE
    view.close()
    _print_state(found)
    return Exit.DONE


def _verdict(found: RunDir) -> list[str]:
    """Returns the lines of what the launcher has found out about a failure, which it does not for a rank that has said
    why itself."""
    from shardwise.foreign_json import read_object
    from shardwise.launch.verdict import VERDICT, lost_line

    verdict = read_object(found.crash / VERDICT)
    lost = lost_line(verdict["step"], verdict["saved"], verdict["lost_s"])
    return [f"class    {verdict['fault']}: {verdict['why']}", f"lost     {lost}"]


def _print_state(found: RunDir) -> None:
    from shardwise.report.memory import measured_memory
    from shardwise.report.predicted_and_measured import comparison_lines
    from shardwise.report.step_breakdown import RECENT, bar, measured_pipeline, seconds_by_kind
    from shardwise.report.terminal import format_rate, sparkline
    from shardwise.run.clock import verdict

    state, steps, plan = found.state(), list(found.steps().values()), found.read_plan()
    say(
        f"run      {found.path}: {state}, {len(steps)} of {plan.get('num_steps', '?')} steps, {plan.get('layout', '?')}"
    )
    if steps:
        say(f"loss     {steps[-1]['loss']:.4f}  {sparkline([line['loss'] for line in steps])}")
        where = seconds_by_kind(steps)
        rate = sum(line["tokens"] for line in steps[-RECENT:]) / max(where["step_s"], 1e-9)
        say(f"speed    {format_rate(rate)} tok/s; {verdict(where)}")
        say(f"where    {bar(where)}")
    shown = _drawn(lambda: measured_pipeline(found)), _drawn(lambda: measured_memory(found))
    for picture in shown:
        if picture:
            say(picture.text(_width()))
    event = found.last_event() or {}
    for line in _drawn(lambda: comparison_lines(plan["measured"])) or ():
        say(line)
    if "dp" not in plan or not isinstance(plan["dp"], int):
        say(f"note     {found.plan} is missing or damaged: what it would show is left out")
    restarts = [line for line in found.lines() if line.get("event") == "restarted"]
    if restarts:
        say(f"restarts {len(restarts)} so far; the last: {restarts[-1].get('why')}")
    if state in ("failed", "stopped", "unfinished"):
        why = event.get("why") or "it ended without a last word (killed, or the machine went down)"
        say(f"why      {why}")
        for line in _drawn(lambda: _verdict(found)) or () if state == "failed" else ():
            say(line)
        for file in sorted(found.crash.glob("*.txt")):
            last = file.read_text(encoding="utf-8").strip().splitlines()[-1:]
            say(f"crash    {file}: {''.join(last)}")
        say(f"do       {found.how_to_resume()}")
