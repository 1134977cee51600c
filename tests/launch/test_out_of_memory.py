"""Out of memory while a run goes on: exit code 3, a verdict of three lines whose commands work, and no rank left
waiting.

The planner refuses what it knows not to fit. So here a run is prepared with room enough, and the limit is lowered
before it starts.
"""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from commands import SMALL, be_no_rank, caught, losses_of
from forked_python import forked_ranks
from ranks import RankPool

from shardwise.config.load import load_config
from shardwise.errors import Exit
from shardwise.launch import planner as launch_planner
from shardwise.launch.local import start_ranks
from shardwise.launch.out_of_memory import out_of_memory
from shardwise.launch.start import new_run, plan_run, start
from shardwise.launch.worker import run_worker
from shardwise.memory.points import OverLimit, Point
from shardwise.run.ranks import Ranks
from shardwise.run.rundir import RunDir

WORDS = [*SMALL, "train.seq_len=512", "train.steps=1", "train.sample_tokens=0", "train.micro_batch=4"]


def prepared(limit: str, *words: str) -> RunDir:
    """A run whose config has another limit than it was planned for."""
    run = new_run(plan_run(load_config(None, [*WORDS, *words, "memory.limit=4GiB"]), None, progress=False))
    text, number = re.subn(r"(?m)^limit = .*$", f'limit = "{limit}"', run.config.read_text())
    assert number == 1
    run.config.write_text(text)
    return run


def test_a_rank_over_its_limit_stops_with_a_verdict(
    workdir: Path, run_here: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run = prepared("365MiB", "model.num_layers=4", "parallel.dp=1", "run.name=full")
    assert run_worker(run, Ranks(), verify=False) == Exit.OUT_OF_MEMORY
    what, why, fix = [line for line in capfd.readouterr().err.splitlines() if line.strip()][-3:]
    assert re.match(r"error: out of memory on rank 0 in \w+ of micro-batch 0: [\d.]+ MiB of 365 MiB, .* over", what)
    assert re.match(
        r"  why  it held parameters .*, activations [\d.]+ MiB.*, process .*; largest: .* \([\d.]+ \w+\)", why
    )
    assert fix.startswith("  fix  `shardwise resume ")
    event = run.last_event()
    assert event is not None and (event["event"], event["exit"]) == ("failed", 3)
    commands = re.findall(r"`shardwise (resume [^`]*)`", fix)
    assert 1 <= len(commands) <= 3
    assert run_here(*commands[0].split()) == Exit.DONE
    assert run.last_event()["event"] == "finished"  # type: ignore[index]


def started(path: str) -> tuple[int, str]:
    """In a process of the pool, as the launcher of two ranks. Its exit code, and what they said."""
    be_no_rank()
    with caught(2, sys.stderr) as said, forked_ranks():
        code = start_ranks(RunDir(Path(path)), 2, 1, None, ["--no-verify"])
    return code, said[0]


def test_one_full_rank_ends_the_others_too(workdir: Path, ranks: RankPool) -> None:
    """The first of two stages has most layers, and two micro-batches under way where the second has one."""
    layers = ("model.num_layers=8", "parallel.layout=pp=2", "parallel.split=7,1", "train.global_batch=16")
    run = prepared("345MiB", *layers, "run.name=one")
    [(code, said)] = ranks.run(started, 1, str(run.path), fresh=True)  # within 120 s: a collective would wait for 300
    assert code == Exit.OUT_OF_MEMORY
    assert "error: out of memory on rank 0" in said
    assert run.last_event()["exit"] == Exit.OUT_OF_MEMORY  # type: ignore[index]


def started_smaller(limit: int, words: list[str]) -> tuple[int, str]:
    """In a process of the pool, as the launcher. Its exit code, and what was said."""
    be_no_rank()
    launch_planner.PROCESS_BYTES = {"cpu": 0}  # of this process alone: tensors are counted, which are always the same
    planned = plan_run(load_config(None, [*WORDS, *words, "memory.limit=4GiB"]), None, progress=False)
    planned.config = replace(planned.config, memory=replace(planned.config.memory, limit=limit))
    with caught(1, sys.stdout) as out, caught(2, sys.stderr) as err, forked_ranks():
        code = start(new_run(planned), planned, verify=False)
    return code, out[0] + err[0]


def test_a_smaller_micro_batch_where_that_is_asked(workdir: Path, ranks: RankPool) -> None:
    """The run goes on to its end with the losses that it would have had, in this process and on ranks."""
    losses, limit = {}, 2**32
    for name, layout in (("large", "dp=1"), ("alone", "dp=1"), ("ranks", "dp=2")):
        words = ["model.num_layers=4", f"parallel.layout={layout}", "train.steps=1", "train.eval_batches=1"]
        words += ["run.on_out_of_memory=smaller", f"run.name={name}"]
        [(code, said)] = ranks.run(started_smaller, 1, limit, words, fresh=True)
        assert code == Exit.DONE, said
        run, is_large = RunDir(Path("runs") / name), name == "large"
        losses[name] = losses_of(run.path)
        line = "memory   starting again with micro-batches of 2 sequences in place of 4:"
        if is_large:  # three quarters of its tensors' bytes: half of them are two sequences
            held = run.last_event()["memory"]["fullest"]  # type: ignore[index]
            limit = 3 * (held["peak"] - held["reserved"]) // 4
        assert (line not in said and "error: out of memory" not in said) if is_large else line in said, said
        assert (run.read_plan()["micro_batch"] == 4) is is_large
        assert ("# run.on_out_of_memory" in run.config.read_text()) is not is_large
    assert losses["alone"] == pytest.approx(losses["large"], abs=1e-5)
    assert losses["ranks"] == pytest.approx(losses["large"], abs=1e-5)


def test_an_error_of_the_system_is_a_verdict_too(workdir: Path) -> None:
    job = plan_run(load_config(None, [*WORDS, "parallel.dp=1"]), None, progress=False)
    run, config = new_run(job), job.config
    plain = out_of_memory(MemoryError(), run, Ranks(1, 2, 1, 2), config, job.plan, job.spec, 400 * 2**20)
    assert plain.code == Exit.OUT_OF_MEMORY and len(str(plain).splitlines()) == 3
    assert plain.what == "out of memory on rank 1: the system gave no more memory" and "predicted were" in plain.why
    held = Point(0.0, (100, 0, 100, 200, 2**20, 0), None)
    seen = OverLimit(held.total, held.total, held, [("head.weight", 100)], "CUDA out of memory")
    told = out_of_memory(seen, run, Ranks(0, 2, 0, 2), config, job.plan, job.spec, 400 * 2**20)
    assert "CUDA out of memory" in told.what and "activations 1.0 MiB" in told.why and "head.weight" in told.why
