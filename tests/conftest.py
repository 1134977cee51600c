"""Fixtures that every test may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ranks import RankPool

# Before torch is loaded, for everything that tests start too: a thread that waits for another one gives its core away. By default it
# spins, and on a busy machine a training step of milliseconds takes seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples every time, so that a change fails by what it changed; `make explore` looks for new ones. How long an example takes,
# or its making, depends on who else uses the cores.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("tests"), derandomize=False, print_blob=True)
settings.load_profile("tests")


@pytest.fixture(autouse=True)
def same_chance() -> None:
    """A test draws the same numbers, whatever ran before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run_here(workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Run a verb in this process, on the CPU; returns its exit code. Fast, because torch is loaded already."""
    from shardwise.cli.main import main

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return lambda *words: int(main([str(word) for word in words]))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Warm rank processes on the CPU: `ranks.run(function, 4, *args)` calls a function on four ranks that meet over gloo."""
    from ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def repeatable_on_gpu() -> Iterator[None]:
    """Kernels that add in the order threads arrive (an index's backward) would differ from themselves in bf16."""
    import torch
    import torch.distributed as dist

    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    if dist.is_initialized():
        dist.destroy_process_group()
