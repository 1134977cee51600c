"""The Makefile's targets do what README.md says, as far as that shows without running them."""

from __future__ import annotations

import os
import shutil
import subprocess
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


def test_lint_and_test_are_what_ci_runs():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make lint" in script and "make test" in script


def test_setup_installs_what_an_optimizer_of_the_config_needs():
    """adamw8bit is torchao's; every other technique of the default set-up needs the dependencies alone."""
    assert any("'.[lowbit]'" in line for line in recipe("setup", "--always-make"))


def test_torch_is_pinned_exactly():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.13.0"]
    assert not any("://" in pin for pin in pins)
