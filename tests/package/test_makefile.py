"""The Makefile's targets do what README.md says, as far as that shows without running them."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def last_line(target: str) -> str:
    """The last command `make TARGET` would run."""
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # not inside `make test`
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, env=outside)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "target, command",
    [("train", ".venv/bin/shardwise train"), ("test", ".venv/bin/python -m pytest"), ("lint", ".venv/bin/mypy")],
)
def test_a_target_ends_in_its_command(target, command):
    assert last_line(target).endswith(command)


def test_lint_and_test_are_what_ci_runs():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make lint" in script and "make test" in script


def test_torch_is_pinned_exactly():
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    assert [pin for pin in pins if pin.startswith("torch==")] == ["torch==2.13.0"]
    assert not any("://" in pin for pin in pins)
