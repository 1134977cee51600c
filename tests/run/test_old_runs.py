"""What an earlier version has written is still of use: its runs resume, evaluate, sample and export, its plan files are
read.

The files are in golden/old_runs, with a page that says how they came to be. Only commands are used, as their owner
would type them. Numbers may differ in the last digits from machine to machine, so losses are compared within 1e-5 of
themselves.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import STORIES, losses_of, warm_command
from ranks import RankPool
from safetensors import safe_open

OLD = Path(__file__).parents[1] / "golden" / "old_runs"
EXPECTED = json.loads((OLD / "expected.json").read_text())
RUNS = EXPECTED["runs"]
CLOSE = 1e-5


@pytest.fixture
def home(workdir: Path) -> Path:
    """A directory as the owner of the runs had it, but for empty directories, which git and some tools leave out."""
    shutil.copy(STORIES, workdir)
    shutil.copytree(OLD / "base-hf", workdir / "base-hf")
    for name in (*RUNS, "complicated"):
        shutil.copytree(OLD / name, workdir / "runs" / name)
    return workdir


@pytest.fixture
def read(run_here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """What a command says with --json."""

    def read(*words: object) -> Any:
        capsys.readouterr()
        assert run_here(*words, "--json") == 0, words
        return json.loads(capsys.readouterr().out)

    return read


def shapes(file: Path) -> dict[str, list[int]]:
    with safe_open(file, framework="pt") as tensors:
        names = tensors.keys()
        return {name: list(tensors.get_slice(name).get_shape()) for name in names}


def check_losses(name: str, run: Path) -> None:
    """Steps 5 to 8 were trained now, after step 4 of the old checkpoint, and have the losses that they had."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    resumed = next(number for number, line in enumerate(lines) if line.get("event") == "resumed")
    assert lines[resumed]["step"] == 4 and lines[-1]["event"] == "finished"
    new = [line for line in lines[resumed:] if "loss" in line and "event" not in line]
    assert [line["step"] for line in new] == [5, 6, 7, 8]
    assert {str(line["step"]): line["loss"] for line in new} == pytest.approx(RUNS[name]["losses"], rel=CLOSE)
    assert set(losses_of(run)) == set(range(1, 9))


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_goes_on_and_is_evaluated_and_exported(
    name: str, home: Path, ranks: RankPool, run_here: Callable[..., int], read: Callable[..., Any]
) -> None:
    old = RUNS[name]
    assert read("eval", name)["loss"] == pytest.approx(old["eval_loss_before"], rel=CLOSE)
    done = warm_command(ranks, "resume", name, "--no-verify", *old["resume"], cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    check_losses(name, home / "runs" / name)
    assert read("eval", name)["loss"] == pytest.approx(old["eval_loss"], rel=CLOSE)
    exports = {"plain": ([], old["export"])} | (
        {"merged": (["--merge-lora"], old["merged"])} if "merged" in old else {}
    )
    for out, (words, files) in exports.items():
        assert run_here("export", name, "--to", "hf", "--no-verify", *words, "--out", out) == 0
        assert {file: shapes(home / out / file) for file in files} == files
    whole = home / ("merged" if "merged" in old else "plain")
    words = ["data.source=stories.jsonl", "train.seq_len=32"]
    assert read("eval", whole, *words)["loss"] == pytest.approx(old["eval_loss"], rel=CLOSE)


@pytest.mark.parametrize("name, layout", [("dense", "dp=1 tp=2 sp"), ("pipeline", "dp=2 zero=3")])
def test_an_old_run_goes_on_in_another_layout(name: str, layout: str, home: Path, ranks: RankPool) -> None:
    done = warm_command(ranks, "resume", name, "--no-verify", f"parallel.layout={layout}", cwd=home)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"plan     {layout} fp32" in done.stdout
    check_losses(name, home / "runs" / name)


@pytest.mark.parametrize("name", RUNS)
def test_an_old_run_is_sampled_from(name: str, home: Path, read: Callable[..., Any]) -> None:
    said = read("generate", name, "--prompt", "Once", "--max-tokens", 4, "--temperature", 0)
    assert said["prompt"] == "Once" and said["completion"]


def test_an_old_checkpoint_is_evaluated_by_itself(home: Path, read: Callable[..., Any]) -> None:
    found = read("eval", "runs/dense/checkpoints/step-4")
    assert found["loss"] == pytest.approx(RUNS["dense"]["eval_loss_before"], rel=CLOSE)


def test_old_runs_are_listed_watched_and_compared(
    home: Path, run_here: Callable[..., int], read: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_here("runs") == 0
    listed = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    for name, old in RUNS.items():
        assert f" {old['state']} " in listed[name]
    layout = EXPECTED["complicated"]["layout"]
    assert layout in listed["complicated"]
    watched = read("watch", "complicated")
    assert (watched["layout"], watched["state"], watched["step"]) == (layout, "finished", 2)
    assert watched["loss"] == EXPECTED["complicated"]["last_loss"]
    capsys.readouterr()
    assert run_here("watch", "pipeline", "--once") in (0, 5)  # it ended with 5
    shown = capsys.readouterr().out
    assert "pipeline step 6 as it ran: " in shown and "rank 1 |" in shown and "killed by SIGKILL" in shown
    compared = read("compare", "dense", "complicated")
    assert compared["settings"]["parallel.schedule"] == ["1f1b", "zbv"]
    assert compared["figures"]["b"]["last loss"] == EXPECTED["complicated"]["last_loss"]


@pytest.mark.parametrize("file, layout", EXPECTED["plans"].items())
def test_an_old_plan_file_is_planned_as_it_is_written_or_refused_in_three_lines(
    file: str, layout: str | None, home: Path, run_here: Callable[..., int], capsys: pytest.CaptureFixture[str]
) -> None:
    limit = "16GB" if layout else "4GB"  # for each rank, whatever this machine has
    code = run_here("train", OLD / file, "--dry-run", "data.source=stories.jsonl", f"memory.limit={limit}")
    said = capsys.readouterr()
    if layout is not None:
        assert code == 0, said.err
        assert f"plan     {layout}: as asked" in said.out
    else:
        what, why, fix = said.err[said.err.index("error: ") :].splitlines()
        assert code in (2, 3) and "does not fit" in what and why.startswith("  why  ") and fix.startswith("  fix  ")
