"""What `shardwise plan` wrote is what `shardwise train` runs, and what was measured is what a run is planned with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.errors import Exit

JOB = ("--seq", "32", "--batch", "256", "--out", "plans/here")


def layout_of(file: Path) -> str:
    """As the second line of a row says it."""
    return file.read_text().splitlines()[1].partition(": ")[2].partition(" on ")[0]


def test_a_row_trains_as_it_is(run_here, workdir):
    assert run_here("plan", "tiny", "--cluster", "cpu", *JOB) == Exit.DONE
    row = Path("plans/here/1.toml")
    assert run_here("train", row, "train.steps=2", "run.name=row", "train.sample_tokens=0") == Exit.DONE
    plan = json.loads(Path("runs/row/plan.json").read_text())
    assert plan["layout"] == layout_of(row)
    assert (plan["seq_len"], plan["global_batch"]) == (32, 8)
    assert f"# {row}:" in Path("runs/row/config.toml").read_text()


def test_every_row_for_two_ranks_is_planned_as_it_is_written(run_here, workdir, capsys):
    assert run_here("plan", "tiny", "--cluster", "2xcpu", "--top", "6", *JOB) == Exit.DONE
    rows = sorted(Path("plans/here").glob("*.toml"))
    assert len(rows) > 2
    for row in rows:
        capsys.readouterr()
        assert run_here("train", row, "--dry-run") == Exit.DONE
        plan = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("plan     "))
        assert plan.startswith(f"plan     {layout_of(row)} fp32: ")


def test_a_run_is_planned_with_a_measured_machine(run_here, workdir, capsys):
    Path("cluster.toml").write_text('nodes = 1\nper_node = 2\ngpu = "cpu"\n[device]\nflops = { fp32 = 1e11 }\n')
    assert run_here("train", "--dry-run", "--cluster", "cluster.toml") == Exit.DONE


@pytest.mark.parametrize("file", ["8xh100", "nowhere.toml"])
def test_another_machine_is_refused(run_here, workdir, capsys, file):
    assert run_here("train", "--dry-run", "--cluster", file) == Exit.USER_MISTAKE
    assert len(capsys.readouterr().err.splitlines()) == 3
