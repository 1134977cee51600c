"""One rank: builds all variants side by side, checks their first losses, then times their steps in turn.

A round is one step of every variant on the same data, in an order that changes from round to round but is the same on
all ranks. A barrier stands before each step, so that no variant pays for another's stragglers. A step's time is that of
its slowest rank. Python's garbage collector runs between rounds, never inside a step.
"""

from __future__ import annotations

import gc
import json
import math
import os
import random
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from peers.patches import Patches
from peers.setting import Batch, Done, Setting, Step, reference
from peers.variants import VARIANTS

LOSS_TOLERANCE = 1e-4  # absolute
NORM_TOLERANCE = 1e-4  # relative
TIMEOUT = timedelta(minutes=3)


@dataclass(frozen=True)
class Job:
    setting: Setting
    names: tuple[str, ...]
    rounds: int
    warmup: int
    check_steps: int
    threads: int
    port: int
    folder: Path


@dataclass
class Built:
    name: str
    step: Step
    patches: Patches
    seconds: list[float] = field(default_factory=list)
    last: float = math.nan

    def run(self, batch: list[Batch]) -> tuple[Done, float]:
        with self.patches.applied():
            dist.barrier()
            start = time.perf_counter()
            done = self.step(batch)
            return done, time.perf_counter() - start


def run_rank(rank: int, job: Job) -> None:
    terminal = _quiet(rank, job)
    _join(rank, job)
    built, report = _build(rank, job, terminal)
    _time_rounds(rank, job, built, terminal)
    step_s = {variant.name: _slowest(variant.seconds[job.warmup :]) for variant in built}
    for variant in built:
        report[variant.name]["last_loss"] = _mean(variant.last)
    if rank == 0:
        (job.folder / "result.json").write_text(json.dumps({"variants": report, "step_s": step_s}))
    dist.barrier()
    dist.destroy_process_group()


def _quiet(rank: int, job: Job) -> TextIO:
    """Libraries print to the rank's log. What the benchmark itself says goes to the terminal, from rank 0."""
    terminal = os.fdopen(os.dup(1) if rank == 0 else os.open(os.devnull, os.O_WRONLY), "w")
    log = os.open(job.folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    warnings.simplefilter("ignore", FutureWarning)  # printing them at each collective would be charged to the library
    return terminal


def _join(rank: int, job: Job) -> None:
    """A file is the meeting point and gloo talks over loopback only. Address and port are names that libraries ask
    for."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.setting.ranks),
        LOCAL_WORLD_SIZE=str(job.setting.ranks),
        LOCAL_SIZE=str(job.setting.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(job.port),
    )
    torch.set_num_threads(job.threads)
    meeting = f"file://{job.folder / 'store'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=job.setting.ranks, timeout=TIMEOUT)


def _build(rank: int, job: Job, terminal: TextIO) -> tuple[list[Built], dict[str, dict[str, Any]]]:
    """All variants that work and compute the right thing, and what there is to say about each."""
    expected = reference(job.setting, job.check_steps)
    losses = "  ".join(f"{loss:.5f}" for loss, _ in expected)
    print(f"losses of the first {job.check_steps} steps, one process: {losses}", file=terminal, flush=True)
    built: list[Built] = []
    report: dict[str, dict[str, Any]] = {}
    for name in job.names:
        outcome: dict[str, Any] = {"status": "ok"}
        patches, step, error = Patches(), None, ""
        try:
            with patches.collect():
                step = VARIANTS[name].build(job.setting)
        except Exception as failure:
            traceback.print_exc()
            error = f"failed to build: {_first_line(failure)}"
        error = _any_rank(error)
        if not error:
            assert step is not None
            variant = Built(name, step, patches)
            outcome["changes_in_torch"] = patches.names
            error = _check(rank, job, variant, expected, outcome)
            if not error:
                built.append(variant)
        if error:
            outcome["status"] = error
        report[name] = outcome
        off = (
            f"losses within {outcome['loss_off']:.1e}, norms {outcome['norm_off']:.1e}" if "loss_off" in outcome else ""
        )
        changes = f"  (changes {', '.join(patches.names)}; kept to its own steps)" if patches.names else ""
        print(f"  {name:<22} {error or 'same'}  {off}{changes}", file=terminal, flush=True)
    return built, report


def _check(rank: int, job: Job, variant: Built, expected: list[tuple[float, float]], outcome: dict[str, Any]) -> str:
    """The first steps against one process that holds the whole batch. Empty when they agree."""
    error, loss_off, norm_off = "", 0.0, 0.0
    for number, (loss, norm) in enumerate(expected):
        try:
            done, _ = variant.run(job.setting.batch(number, rank))
        except Exception as failure:
            traceback.print_exc()
            error = f"failed in step {number + 1}: {_first_line(failure)}"
        if error := _any_rank(error):
            return error
        found = done.norm.full_tensor() if hasattr(done.norm, "full_tensor") else done.norm
        loss_off = max(loss_off, abs(_mean(done.loss) - loss))
        norm_off = max(norm_off, abs(float(found) - norm) / norm)
    outcome["loss_off"], outcome["norm_off"] = loss_off, norm_off
    if not (loss_off <= LOSS_TOLERANCE and norm_off <= NORM_TOLERANCE):  # written so that NaN fails
        return "wrong: it computes something else"
    return ""


def _time_rounds(rank: int, job: Job, built: list[Built], terminal: TextIO) -> None:
    gc.collect()
    gc.freeze()
    gc.disable()
    start = time.perf_counter()
    total = job.warmup + job.rounds
    for number in range(total):
        batch = job.setting.batch(job.check_steps + number, rank)
        for variant in random.Random(number).sample(built, len(built)):
            done, seconds = variant.run(batch)
            variant.seconds.append(seconds)
            variant.last = done.loss
        gc.collect()
        if number + 1 == total or (number + 1) % 20 == 0:
            left = (time.perf_counter() - start) / (number + 1) * (total - number - 1)
            print(f"round {number + 1} of {total}, {left:.0f} s left", file=terminal, flush=True)


def _first_line(failure: Exception) -> str:
    return next(iter(f"{type(failure).__name__}: {failure}".splitlines()))  # the whole of it is in the rank's log


def _any_rank(error: str) -> str:
    """The first error of any rank, or empty."""
    errors: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    return next((f"rank {rank}: {text}" if rank else text for rank, text in enumerate(errors) if text), "")


def _mean(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def _slowest(seconds: list[float]) -> list[float]:
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return times.tolist()
