"""Says why a rank cannot go on: one line or three to the person, the traceback to a file, the last event to
metrics.jsonl."""

from __future__ import annotations

import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from shardwise.errors import Exit, UserError
from shardwise.launch.out_of_memory import out_of_memory
from shardwise.run.guards import LOST_PEER
from shardwise.run.ranks import Ranks
from shardwise.run.rundir import RunDir
from shardwise.run.session import Session
from shardwise.terminal import say_error

NO_COMPILER = ("No working C++ compiler", "Failed to find C compiler")
"""Parts of the errors for a missing compiler, by torch.compile on CPUs and by Triton on GPUs."""


def fail(run: RunDir, ranks: Ranks, code: Exit, text: str) -> int:
    """Prints why this rank ends, notes it in metrics.jsonl and returns the exit code. Other ranks print to their logs;
    the launcher shows that if the first rank had nothing of its own to say."""
    say_error(text)
    if ranks.is_first:
        _write_last_event(run, code, text.splitlines()[0])
    return int(code)


def crash(run: RunDir, ranks: Ranks, error: Exception) -> int:
    """Reports a bug of ours, or a peer that went away, and returns the exit code: the traceback goes to a file, one
    line to the person."""
    lost_peer = isinstance(error, dist.DistBackendError | dist.DistNetworkError) or "gloo" in str(error).lower()
    code = Exit.HARDWARE if lost_peer else Exit.BUG
    file = keep_traceback(run, ranks)
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    why = "this is a bug of shardwise"
    if lost_peer:  # in the words of gloo and NCCL it is hard to find
        waited = "time" in said.lower() and "out" in said.lower()
        said = "another rank did not answer within comm.timeout" if waited else "another rank went away"
        why = "it has ended, or is stuck"
        if ranks.is_supervised:  # the launcher knows which one, and says it once
            return LOST_PEER
    if ranks.is_first or not lost_peer:
        say_error(f"error: rank {ranks.rank}: {said}\n  why  {why}; details in {file}")
        say_error(f"  fix  {run.how_to_resume()}")
    if ranks.is_first:
        _write_last_event(run, code, said if lost_peer else str(error)[:500])
    return int(code)


def keep_traceback(run: RunDir, ranks: Ranks) -> Path:
    """Writes the traceback of the error at hand to a file, and returns its path."""
    file = run.crash / f"rank{ranks.rank}.txt"
    try:
        file.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:
        traceback.print_exc()
    return file


def _write_last_event(run: RunDir, code: Exit, why: str) -> None:
    event = "stopped" if code in (Exit.STOPPED, Exit.INTERRUPTED) else "failed"
    with suppress(OSError):  # the disk may be full, which is what was just said
        run.append({"event": event, "exit": int(code), "why": why, "wall_time": time.time()})


def ran_out_of_memory(error: BaseException, run: RunDir, ranks: Ranks, session: Session | None) -> UserError:
    if session is None:
        return UserError(
            "out of memory before the run began",
            why=str(error) or "the system gave no more memory",
            fix=f"end what else runs on this machine, then `{run.how_to_resume()}`",
            code=Exit.OUT_OF_MEMORY,
        )
    config, plan, spec = session.config, session.plan, session.spec
    return out_of_memory(error, run, ranks, config, plan, spec, session.memory_limit)


def lacks_compiler(error: Exception) -> bool:
    return any(sign in str(error) for sign in NO_COMPILER)


def no_compiler(run: RunDir) -> UserError:
    return UserError(
        "this machine has no compiler for speed.compile",
        why="torch.compile makes C++ on CPUs and starts its GPU kernels from C; neither g++ nor gcc is found",
        fix=f"{run.how_to_resume('speed.compile=none')}   or install g++",
    )
