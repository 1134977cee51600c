"""The small text, a tiny model, and the real command run as a user would run it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STORIES = Path(__file__).parent / "golden" / "stories.jsonl"

SMALL = [
    "model.num_layers=2",
    "model.hidden=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.ffn=64",
    f"data.source={STORIES}",
    "train.seq_len=32",
    "train.global_batch=8",
    "optimizer.lr=1e-3",
]
"""A model that trains a step in milliseconds."""


def _hear_ctrl_c() -> None:
    """Whoever starts the tests in the background has SIGINT ignored, and children inherit that; a terminal's do not."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start_command(*words: object, cwd: Path, **options: Any) -> subprocess.Popen[str]:
    """Start the real command as a user would, in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "shardwise", *map(str, words)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=_hear_ctrl_c,
        env={**os.environ, "PYTHONUNBUFFERED": "1", "CUDA_VISIBLE_DEVICES": ""},
        **options,
    )


def run_command(*words: object, cwd: Path, timeout: float = 180.0) -> subprocess.CompletedProcess[str]:
    """Run the real command to its end; a hang is killed with its whole process group and fails with its output."""
    process = start_command(*words, cwd=cwd)
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        pytest.fail(f"shardwise {' '.join(map(str, words))} hung for {timeout} s; its output:\n{output}")
    return subprocess.CompletedProcess(process.args, process.returncode, output, "")


def finish(process: subprocess.Popen[str], timeout: float = 60.0) -> str:
    """The output of a process that was told to stop; one that does not is killed, and the test fails with what it said."""
    try:
        return process.communicate(timeout=timeout)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        pytest.fail(f"still running {timeout} s after it was told to stop:\n{process.communicate()[0]}")


def losses_of(run: Path, key: str = "loss") -> dict[int, float]:
    """The loss (or another metric) of each step, the later line winning."""
    found = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        if "loss" in values and "event" not in values:
            found[values["step"]] = values[key]
    return found
