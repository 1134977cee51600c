"""`shardwise stop` asks a run to finish its step, commit a checkpoint and end."""

from __future__ import annotations

import argparse
import time

from shardwise.errors import Exit, UserError
from shardwise.terminal import say

HELP = "Stop a run cleanly: it finishes its step, commits a checkpoint and can be resumed."
TIMEOUT_S = 300.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="a run directory, a name, or `last`")
    parser.add_argument("--runs", default="runs", metavar="DIR", help="where to look for names (default: runs)")
    parser.add_argument("--no-wait", action="store_true", help="only ask; do not wait until it has stopped")


def run(args: argparse.Namespace) -> int:
    from shardwise.run.rundir import find_run

    found = find_run(args.run, args.runs)
    if not found.is_locked():
        say(f"run      {found.path} is not running ({found.state()})")
        return Exit.DONE
    found.stop_request.touch()
    if args.no_wait:
        say(f"asked    {found.path} to stop")
        return Exit.DONE
    deadline = time.monotonic() + TIMEOUT_S
    while found.is_locked():
        if found.state() == "paused":
            raise UserError(
                f"{found.path} is paused: {found.holder()} is stopped",
                why="somebody stopped it (SIGSTOP or Ctrl-Z), and it hears of nothing until it is continued",
                fix="kill -CONT and its number lets it go on, and stop as asked",
            )
        if time.monotonic() > deadline:
            raise UserError(
                f"{found.path} has not stopped after {TIMEOUT_S:.0f} s",
                why="it is saving, evaluating, or its launcher is gone; a step alone is not waited for so long",
                fix=f"wait longer, or kill -9 {found.holder()}: what is committed stays",
            )
        time.sleep(0.2)
    event = found.last_event() or {}
    say(f"stopped  {found.path} at step {event.get('step', '?')}; `{found.how_to_resume()}` goes on")
    return Exit.DONE
