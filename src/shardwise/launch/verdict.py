"""Says to a person how a run ended that did not end by itself: who was first, what kind of fault it was, who merely
waited, what was lost, and what to type. One screen; the same in crash/verdict.json.
"""

from __future__ import annotations

import json
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from shardwise.checkpoint.listing import committed, step_of
from shardwise.config.units import format_seconds
from shardwise.errors import Exit
from shardwise.launch.outcome import Cause, RanksEnded, cause_of, culprit
from shardwise.launch.signs import name_of
from shardwise.run.rundir import RunDir
from shardwise.terminal import counted, say, say_error

VERDICT = "verdict.json"
FIRST_COLUMN, SECOND_COLUMN = 44, 88


def exit_code(run: RunDir, ended: RanksEnded, remark: str = "") -> int:
    """Reports how the ranks ended, where they have not said so themselves, and returns the exit code of the whole.
    `remark` says why they are not started again."""
    if ended.stopped_at_once:
        return _stopped(run, ended)
    event = run.last_event() or {}
    if not ended.failures:
        return int(event.get("exit", Exit.DONE))
    if (cause := cause_of(ended)) is not None:
        if ended.signals or run.stop_request.exists():  # it was to end anyway, and does
            return _stopped(run, ended, cause)
        return _failed(run, cause, remark)
    first = culprit(ended.failures)
    if any(one.rank == 0 and one.code == first.code for one in ended.failures):
        return first.code  # the first rank has said the same on the terminal
    text = first.text or f"error: rank {first.rank} ended with code {first.code}"
    say_error(text)
    if event.get("exit") != first.code:  # the first rank was ended, or has seen only that this one was gone
        _write(run, {"event": "failed", "exit": first.code, "why": text.splitlines()[0]})
    return first.code


def _failed(run: RunDir, cause: Cause, remark: str) -> int:
    done, saved, seconds = lost_steps(run)
    steps = run.read_plan().get("num_steps", "?")
    outside = ", cause outside this run" if cause.outside else ""
    what = f"STOPPED  step {done} of {steps}".ljust(FIRST_COLUMN) + f" class {cause.fault}{outside}"
    lines = [
        what.ljust(SECOND_COLUMN) + f" exit {int(cause.code)}, resumable",
        f"  who    {cause.who}",
        f"  why    {cause.why}" + f"; {remark}" * bool(remark),
        f"  lost   {lost_line(done, saved, seconds)}",
        f"  do     {run.how_to_resume()}",
    ]
    if cause.fault == "MEMORY":
        lines.append(f"         {run.how_to_resume('train.micro_batch=1')}   needs less")
    for line in lines:
        say_error(line)
    about = {**asdict(cause), "code": int(cause.code), "step": done, "saved": saved, "lost_s": seconds}
    with suppress(OSError):
        (run.crash / VERDICT).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    about = {"rank": cause.rank, "fault": cause.fault, "host": cause.host}
    _write(run, {"event": "failed", "exit": int(cause.code), "why": cause.who, **about})
    return int(cause.code)


def lost_steps(run: RunDir) -> tuple[int, int, float]:
    """Returns the last step that was made, the step of the newest checkpoint, and the seconds of the steps between."""
    steps = run.steps()
    saved = next((step_of(path) or 0 for path in committed(run.checkpoints)), 0)
    return max(steps, default=0), saved, sum(line["step_s"] for step, line in steps.items() if step > saved)


def in_words(done: int, saved: int, seconds: float) -> str:
    """Returns what is lost: the steps since the newest checkpoint, and the time they took."""
    lost = max(0, done - saved)
    return f"{counted(lost, 'step')}, {format_seconds(seconds)}" if lost else "only the step it was at"


def lost_line(done: int, saved: int, seconds: float) -> str:
    """Returns what is lost and what is kept, in words."""
    kept = f"step {saved} is committed" if saved else "no checkpoint was committed yet"
    return f"{in_words(done, saved, seconds)}; {kept}"


def _stopped(run: RunDir, ended: RanksEnded, cause: Cause | None = None) -> int:
    """Reports ranks that had nothing to commit yet, were told twice to stop, or could not stop; returns the exit
    code."""
    number = ended.signals[0] if ended.signals else 0
    code = Exit.INTERRUPTED if number == signal.SIGINT else Exit.STOPPED
    why = "Ctrl-C" if number == signal.SIGINT else name_of(number) if number else "`shardwise stop`"
    hindered = f": {cause.who}" if cause else f": {ended.impatience}" if ended.impatience else ""
    say(f"STOPPED  at once, by {why}; the last checkpoint, if any, is kept            exit {int(code)}, resumable")
    if hindered:
        say(f"  why    not after a step{hindered}")
    say(f"  do     {run.how_to_resume()}")
    _write(run, {"event": "stopped", "exit": int(code), "why": f"{why}{hindered}"})
    return int(code)


def _write(run: RunDir, event: dict[str, Any]) -> None:
    with suppress(OSError):  # the disk may be full, or the directory gone
        run.append(event | {"wall_time": time.time()})
