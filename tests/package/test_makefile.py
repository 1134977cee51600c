"""The Makefile's targets do what README.md says, as far as that shows without running them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def recipe(target: str, *options: str) -> list[str]:
    """The commands that `make TARGET` would run, a line each."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # not inside `make test`
    done = subprocess.run(["make", "-n", *options, target], cwd=ROOT, capture_output=True, text=True, env=outside)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()


@pytest.mark.parametrize(
    "target, command",
    [("train", ".venv/bin/shardwise train"), ("lint", ".venv/bin/mypy")],
)
def test_a_target_ends_in_its_command(target, command):
    assert recipe(target)[-1].endswith(command)


@pytest.mark.parametrize("fails", [0, 1, 2, 3])
def test_a_failure_in_any_lane_fails_the_whole(fails: int, tmp_path: Path):
    """The recipe itself, with a script in place of Python (which also says what tests cost): a lane that fails decides
    the exit code, and all reports are shown."""
    stub = tmp_path / "python"
    stub.write_text(f'#!/bin/sh\n[ "$1" = -m ] || exit 0\necho "report of $5"\n[ "$5" != {fails} ]\n')
    stub.chmod(0o755)
    (tmp_path / "venv").mkdir()
    for done in (".installed", ".installed-dev"):
        (tmp_path / "venv" / done).touch()
    words = ["make", "test", "LANES=3", f"BIN={tmp_path}", f"VENV={tmp_path / 'venv'}"]
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=outside)
    assert (done.returncode == 0) == (fails == 0), done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if "report" in line] == [
        f"report of {lane}" for lane in (1, 2, 3)
    ]


def test_lint_and_tests_are_what_ci_runs():
    lines = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("make")] == [
        "make lint",
        "make test",
        "make cluster-tools",
        "make test-cluster",
    ]


def test_tests_on_nodes_are_no_part_of_the_others():
    [test] = [line for line in recipe("test", "LANES=1") if "pytest" in line]
    assert "tests/nodes" not in test and any("pytest tests/nodes" in line for line in recipe("test-cluster"))
    collected = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/nodes"]
    found = subprocess.run(collected, cwd=ROOT, capture_output=True, text=True).stdout
    assert "tests/nodes/test_acted_nodes.py" in found, "asked for by name"


def test_setup_installs_what_an_optimizer_of_the_config_needs():
    """adamw8bit is torchao's; every other technique of the default set-up needs the dependencies alone."""
    assert any("'.[lowbit]'" in line for line in recipe("setup", "--always-make"))


def test_torch_is_pinned_exactly():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.13.0"]
    assert not any("://" in pin for pin in pins)
