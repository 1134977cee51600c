"""Layouts through the real command: the same losses, checkpoints that any layout reads, and clear ends for what cannot
work.

What a layout computes is seen on warm ranks. Ranks that the program starts itself are in the resumed run, the proof and
the kill.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import SMALL, finish, losses_of, start_command, warm_command
from ranks import RankPool
from test_processes import alive, children, process_of_rank

from shardwise.errors import Exit

FP64 = [*SMALL, "model.num_layers=4", "memory.precision=fp64", "train.micro_batch=2", "train.steps=4"]
CONSTANT = ["optimizer.schedule=constant", "optimizer.warmup=0"]  # the same steps, however long the run


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process, no layout: the run that the others are compared with."""
    home = tmp_path_factory.mktemp("alone")
    done = warm_command(ranks, "train", "--nproc", 1, *FP64, *CONSTANT, "run.name=one", cwd=home)
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    return home / "runs/one"


def same(run: Path, other: Path, steps: range = range(1, 5)) -> None:
    for key, limit in (("loss", 1e-9), ("grad_norm", 1e-9)):
        a, b = losses_of(run, key), losses_of(other, key)
        assert [a[step] for step in steps] == pytest.approx([b[step] for step in steps], abs=limit), key


def last_lines(run: Path, key: str) -> object:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line[key] for line in reversed(lines) if key in line)


@pytest.mark.parametrize("layout, world", [("dp=3 zero=3", 3), ("dp=1 tp=2 sp pp=2 schedule=zbv", 4)])
def test_a_layout_trains_evaluates_and_samples_like_one_process(
    layout: str, world: int, alone: Path, ranks: RankPool, tmp_path: Path
) -> None:
    words = [f"parallel.layout={layout}", *FP64, *CONSTANT, "run.name=run", "run.events_every=2"]
    done = warm_command(ranks, "train", *words, cwd=tmp_path, nproc=world)
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    run = tmp_path / "runs/run"
    same(run, alone)
    assert last_lines(run, "eval_loss") == pytest.approx(last_lines(alone, "eval_loss"), abs=1e-9)
    assert "proof    " + layout.split()[0] in done.stdout and "3 steps in fp64" in done.stdout
    assert last_lines(run, "proof")["same"] is True
    if "pp" in layout:
        bubbles = losses_of(run, "bubble_s")
        assert all(value > 0 for value in bubbles.values()), "a pipeline always waits somewhere"
        shown = warm_command(ranks, "watch", "run", cwd=tmp_path).stdout.splitlines()
        at = next(number for number, line in enumerate(shown) if line.startswith("pipeline step 4 as it ran: "))
        assert "idle " in shown[at] and "(predicted " in shown[at]
        for rank, line in enumerate(shown[at + 1 : at + 3]):
            assert re.fullmatch(rf"rank {rank} \|[.0-3a-dA-D]{{80}}\|", line), line
        assert any(line.startswith("where    |█") for line in shown)


def test_a_checkpoint_of_one_layout_goes_on_in_another(alone: Path, ranks: RankPool, tmp_path: Path) -> None:
    """Two layouts after each other; the losses are those of one uninterrupted process."""
    words = [*FP64, *CONSTANT, "run.name=run"]
    layout = "parallel.layout=dp=2 zero=3 pp=2 schedule=zero-bubble"
    first = warm_command(ranks, "train", layout, *words, "train.steps=2", cwd=tmp_path, nproc=4)
    assert first.returncode == Exit.DONE, first.stdout + first.stderr
    longer = ("--allow", "train.steps", "train.steps=4")
    second = warm_command(ranks, "resume", "run", *longer, "parallel.layout=dp=1 tp=2", cwd=tmp_path)
    assert second.returncode == Exit.DONE, second.stdout + second.stderr
    assert "plan     dp=1 tp=2 sp fp64" in second.stdout
    same(tmp_path / "runs/run", alone)
    loss = json.loads(warm_command(ranks, "eval", "run", "--json", cwd=tmp_path).stdout)["loss"]
    assert loss == pytest.approx(last_lines(tmp_path / "runs/run", "eval_loss"), abs=1e-5)


def test_a_layout_is_proven_once(ranks: RankPool, tmp_path: Path) -> None:
    def said(*words: str) -> str:
        done = warm_command(ranks, "train", *SMALL, "train.steps=1", *words, cwd=tmp_path, nproc=2)
        assert done.returncode == Exit.DONE, done.stdout + done.stderr
        return done.stdout

    assert "proof    dp=2: 3 steps in fp64" in said()
    assert "steps in fp64" not in said()
    other = "train.global_batch=7"  # another division of the batch is another proof
    assert "steps in fp64" not in said("--no-verify", other)
    assert "steps in fp64" in said(other)


def test_verify_proves_a_layout(ranks: RankPool, tmp_path: Path) -> None:
    """On ranks of its own; four and eight of them are in README.md and the tutorial."""
    done = warm_command(ranks, "verify", "parallel.layout=dp=2 zero=2", "--steps", 2, "--json", cwd=tmp_path)
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["same"] is True and found["schema"] == 1
    assert max(found[key] for key in ("losses", "norms", "gradients", "parameters")) < 1e-9
    assert list(tmp_path.iterdir()) == [], "a proof leaves nothing behind"


def torchrun(nproc: int, *words: str, cwd: Path, each: str = "") -> subprocess.CompletedProcess[str]:
    """The real torchrun; `each` is Python that may change sys.argv by rank before the command starts."""
    program = f"import os, sys; rank = int(os.environ['RANK']); sys.argv[0] = 'shardwise'\n{each}\n"
    program += "from shardwise.cli.main import main; sys.exit(main())"
    (cwd / "start.py").write_text(program)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}"]
    return subprocess.run(
        [*launcher, "start.py", *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def test_one_rank_with_another_config_stops_the_job(tmp_path: Path) -> None:
    each = "if rank == 1: sys.argv.append('train.seed=7')"
    done = torchrun(2, "train", *SMALL, "train.steps=2", cwd=tmp_path, each=each)
    assert done.returncode != 0
    assert "has another config than rank 0" in done.stderr
    assert done.stderr.count("has another config than") == 1
    assert not (tmp_path / "runs").exists()


def test_a_world_unlike_the_configs_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    done = warm_command(ranks, "train", *SMALL, "parallel.tp=2", "parallel.pp=2", cwd=tmp_path, nproc=2)
    assert done.returncode == Exit.USER_MISTAKE
    assert "4 processes" in done.stderr or "multiply" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


def test_a_rank_that_dies_at_start_ends_the_job(tmp_path: Path) -> None:
    words = [*SMALL, "train.steps=100000", "parallel.layout=dp=2 zero=3 pp=2", "run.max_restarts=0"]
    process = start_command("train", *words, cwd=tmp_path)
    process_of_rank(3, process)
    ranks = children(process.pid)
    os.kill(process_of_rank(2, process), signal.SIGKILL)  # while it imports torch
    output = finish(process)  # the others must not wait for it, which they would do for 300 s
    assert process.returncode == Exit.HARDWARE, output
    assert "rank 2 was killed by SIGKILL while starting" in output
    assert len(ranks) == 4 and not any(map(alive, ranks))
