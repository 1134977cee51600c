"""Results that are read one step late leave the same run directory as those that are read at once; and steps that are
traced."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SMALL, losses_of, warm_command
from ranks import RankPool

from shardwise.errors import Exit
from shardwise.run.checkpoints import CheckpointClock

COMPARED = (
    "event",
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "target_tokens",
    "eval_loss",
    "aux_loss",
    "expert_load_max",
    "exit",
    "skipped",
)
BUSY = [
    "train.steps=7",
    "train.eval_every=3",
    "train.sample_every=2",
    "checkpoint.every=2",
    "checkpoint.keep=9",
    "data.packing=whole",
]
"""Something follows almost every step; rows have different numbers of targets."""


def metrics_of(run: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in COMPARED if key in line} for line in lines]


def saved_by(run: Path) -> dict[str, bytes]:
    files = sorted((run / "checkpoints").glob("step-*/*.safetensors"))
    return {f"{file.parent.name}/{file.name}": file.read_bytes() for file in files}


def train_both(run_here: Callable[..., int], *words: str) -> list[tuple[int, Path]]:
    """Exit code and directory of a run whose results are read at once, and of one that reads late."""
    found = []
    for results in ("at-once", "late"):
        code = run_here("train", "--nproc", 1, *SMALL, f"speed.results={results}", f"run.name={results}", *words)
        found.append((code, Path("runs") / results))
    return found


@pytest.mark.parametrize("model", [[], ["model.preset=tiny-moe", "model.expert_ffn=32"]], ids=["plain", "experts"])
def test_late_results_leave_the_same_files(run_here: Callable[..., int], model: list[str]) -> None:
    (code, now), (late_code, late) = train_both(run_here, *BUSY, *model)
    assert code == late_code == Exit.DONE
    steps = [line["step"] for line in metrics_of(late) if "loss" in line and "event" not in line]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
    assert metrics_of(late) == metrics_of(now)
    assert len(saved_by(late)) >= 4 and saved_by(late) == saved_by(now)


@pytest.mark.parametrize("every", [1, 5])
def test_a_divergence_that_is_read_late_is_never_committed(run_here: Callable[..., int], every: int) -> None:
    wild = ["train.steps=9", "optimizer.name=sgd", "optimizer.lr=1e30", "train.clip=0", "optimizer.warmup=0"]
    (code, now), (late_code, late) = train_both(run_here, *wild, f"checkpoint.every={every}")
    assert code == late_code == Exit.DIVERGED
    assert metrics_of(late) == metrics_of(now)
    steps = [line["step"] for line in metrics_of(late) if "loss" in line]
    assert steps[-1] < 9 and all(int(name[5:].split("/")[0]) < steps[-1] for name in saved_by(late))
    assert saved_by(late) == saved_by(now)


def test_a_run_that_reads_late_stops_where_it_says_and_goes_on(run_here: Callable[..., int]) -> None:
    words = [*SMALL, "speed.results=late", "optimizer.schedule=constant", "optimizer.warmup=0"]
    for limit in ("1s", "10s", "100s"):  # a busy machine may need longer for its first step
        name = f"run.name=cut-{limit}"
        assert (
            run_here("train", "--nproc", 1, *words, name, "train.steps=100000", f"train.time_limit={limit}")
            == Exit.STOPPED
        )
        run = Path(f"runs/cut-{limit}")
        if losses_of(run):
            break
    done = max(losses_of(run))
    assert list(losses_of(run)) == list(range(1, done + 1))
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{done}"]
    steps = f"train.steps={done + 3}"
    assert (
        run_here("resume", run, "--allow", "train.steps", steps, "--allow", "train.time_limit", "train.time_limit=1h")
        == Exit.DONE
    )
    assert run_here("train", "--nproc", 1, *words, "run.name=straight", steps) == Exit.DONE
    assert losses_of(run) == losses_of(Path("runs/straight"))


def test_the_blocks_of_a_run_that_is_watched_are_compiled(run_here: Callable[..., int]) -> None:
    """What looks at every operation of the first two steps would keep torch from ever compiling them."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    words = [*SMALL, "train.steps=4", "speed.compile=trace", "run.name=compiled", "train.sample_tokens=0"]
    assert run_here("train", "--nproc", 1, *words) == Exit.DONE
    assert counters["stats"]["unique_graphs"] >= 1
    memory = json.loads(Path("runs/compiled/metrics.jsonl").read_text().splitlines()[-1])["memory"]
    held, numbers = memory["fullest"], memory["fullest"]["parameters"]
    assert held["gradients"] == numbers and held["optimizer"] >= 2 * numbers > 0
    # What autograd keeps is counted, whoever made it. Plain kernels have other operations than compiled ones, which
    # keep less.
    assert held["activations"] == pytest.approx(memory["predicted"]["activations"], rel=0.25)


def test_a_checkpoint_that_is_due_by_the_clock_is_asked_for_once() -> None:
    """The question is asked again before it is written, where results are read late."""
    clock = CheckpointClock("1h", 0)
    assert not clock.due(1)
    clock.last_time -= 3600  # an hour passes
    assert [clock.due(2), clock.due(3)] == [True, False]
    by_steps = CheckpointClock(2, 0)
    assert [by_steps.due(step) for step in (1, 2, 2, 3, 4)] == [False, True, True, False, True]


@pytest.fixture(scope="module")
def on_two_ranks(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A run of two ranks that reads at once, one that reads late and traces steps 2 and 3, and what that one said."""
    folder, said = tmp_path_factory.mktemp("late"), ""
    for results, more in (("at-once", []), ("late", ["run.profile=2:3"])):
        words = [*SMALL, *BUSY, "parallel.zero=2", f"speed.results={results}", f"run.name={results}", *more]
        done = warm_command(ranks, "train", "--nproc", 2, "--no-verify", *words, cwd=folder)
        assert done.returncode == Exit.DONE, done.stdout + done.stderr
        said = done.stdout
    return folder / "runs" / "at-once", folder / "runs" / "late", said


def test_late_results_of_two_ranks_leave_the_same_files(on_two_ranks: tuple[Path, Path, str]) -> None:
    """Their targets differ from step to step, and are agreed on before they are needed."""
    now, late, _ = on_two_ranks
    assert len({line["target_tokens"] for line in metrics_of(late) if "target_tokens" in line}) > 1
    assert metrics_of(late) == metrics_of(now) and saved_by(late) == saved_by(now)


def test_every_rank_writes_a_trace_of_the_steps_asked_for(on_two_ranks: tuple[Path, Path, str]) -> None:
    now, late, said = on_two_ranks
    assert not (now / "trace").exists()
    assert "trace    runs/late/trace/rank-0.json.gz" in said and "ui.perfetto.dev" in said
    assert sorted(file.name for file in (late / "trace").iterdir()) == ["rank-0.json.gz", "rank-1.json.gz"]
    for file in (late / "trace").iterdir():
        with gzip.open(file) as stream:
            events = json.load(stream)["traceEvents"]
        ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
        assert [name for name in ranges if name.startswith("step ")] == ["step 2", "step 3"]
        for name in ("compute: forward, micro-batch 0, stage 0", "optimizer: clip and update", "data_wait: next batch"):
            assert ranges.count(name) == 2, name
        assert any(name.startswith("comm_exposed: ") and name.endswith("over shard") for name in ranges)
        assert any(event.get("cat") == "cpu_op" and event["name"] == "aten::mm" for event in events)


@pytest.mark.cuda
def test_no_step_waits_for_the_gpu(tmp_path: Path) -> None:
    """From the third on: torch raises at whatever would make the host wait for the device inside of a step."""
    from shardwise.plan.resolve.speed import with_speed
    from shardwise.prove.reference import Trial
    from shardwise.prove.trial import build_trial, trial_batch, trial_plan
    from shardwise.run.clock import Clock
    from shardwise.run.step import start_step
    from shardwise.spec.presets import preset
    from shardwise.spec.schema import OptimizerConfig, SpeedConfig

    device, spec = torch.device("cuda", 0), preset("tiny")
    trial = Trial(global_batch=4, micro_batch=2, seq_len=128, precision="bf16")
    plan = with_speed(replace(trial_plan(trial), device="cuda"), SpeedConfig(), spec)
    engine = build_trial(spec, plan, trial, 0, device)
    optimizer, clock, started = engine.optimizer(OptimizerConfig()), Clock(device), []
    for step in range(1, 7):
        batch, targets = trial_batch(spec, plan, trial, step, 0)
        batch = type(batch)(batch.step, [micro.pinned() for micro in batch.microbatches], batch.num_targets)
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")
        try:
            it = start_step(
                engine, optimizer, batch, num_targets=targets, lr=1e-3, clip=1.0, clock=clock, ask=lambda: [0, 0, 1, 0]
            )
            started.append((it, clock.lap()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for it, lap in started:
        parts = lap.parts()
        assert 0 < it.read().loss < 10 and 0 < parts["compute_s"] <= parts["step_s"]


@pytest.mark.cuda
def test_late_results_of_a_gpu_are_the_same_and_its_steps_add_up(tmp_path: Path) -> None:
    """The real command. A step lasts from the end of the one before to its own, so all of them are as long as the
    run."""
    losses = {}
    for results in ("at-once", "late"):
        words = [*SMALL, "train.steps=30", f"run.name={results}", f"speed.results={results}", "speed.compile=none"]
        words += ["memory.precision=fp32", "train.micro_batch=8", "run.profile=28:29"]
        command = [sys.executable, "-m", "shardwise", "train", "--nproc", "1", "--no-verify", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == Exit.DONE, done.stdout + done.stderr
        run = tmp_path / "runs" / results
        losses[results] = losses_of(run)
        times, ends = losses_of(run, "step_s"), losses_of(run, "wall_time")
        assert sum(times[step] for step in range(6, 26)) == pytest.approx(ends[25] - ends[5], rel=0.5)
        with gzip.open(run / "trace" / "rank-0.json.gz") as stream:
            kinds = {event.get("cat") for event in json.load(stream)["traceEvents"]}
        assert {"kernel", "user_annotation", "cpu_op"} <= kinds
    assert list(losses["late"]) == list(range(1, 31)) and losses["late"] == pytest.approx(losses["at-once"], rel=1e-4)
