"""A directory and a machine for walks."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def place(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory on a machine without a GPU, with a terminal that is wide enough for any line."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("shardwise.run.block_times.BUDGET_S", 0.0)  # three turns are timed, not a second of them
    return workdir
