"""Fixtures that every test may use."""

from __future__ import annotations

import gc
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import costs
import lanes
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from ranks import RankPool

# Before torch is loaded, for everything that tests start too: a thread that waits for another one gives its core away.
# By default it spins, and on a busy machine a training step of milliseconds takes seconds.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# The same examples every time, so that a change fails by what it changed; `make explore` looks for new ones. How long
# an example takes, or its making, depends on who else uses the cores.
settings.register_profile("tests", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", settings.get_profile("tests"), derandomize=False, print_blob=True)
settings.load_profile("tests")


gc.disable()  # until all tests are collected


pytest_runtestloop = pytest.hookimpl(tryfirst=True)(lanes.run)


def pytest_configure(config: pytest.Config) -> None:
    costs.measure(config)


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes.add_options(parser)
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in an order drawn from this seed")


def pytest_collection_finish() -> None:
    """What collecting has made stays to the end. The garbage collector walked over it, and over what the planner
    remembers, again and again: a fifth of the CPU time of the planner's tests."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU or a package that is not here."""
    if (seed := config.getoption("--shuffle")) is not None:
        draw = random.Random(seed)
        drawn = {path: draw.random() for path in dict.fromkeys(item.path for item in items)}
        items.sort(key=lambda item: (drawn[item.path], draw.random()))  # a file stays together: lanes take files
    for item in items:
        if item.get_closest_marker("cuda") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))
        for name in [name for marker in item.iter_markers("needs") for name in marker.args]:
            if importlib.util.find_spec(name) is None:
                item.add_marker(pytest.mark.skip(reason=f"needs {name}"))


@cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(autouse=True)
def same_start() -> None:
    """A test draws the same numbers, whatever ran before it, in one thread: its matrices are tiny, and lanes share
    cores."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def clean_gpu(request: pytest.FixtureRequest, same_start: None) -> Iterator[None]:
    """A test on a GPU neither sees what ran before it nor is seen by what comes after it."""
    if request.node.get_closest_marker("cuda") is None:
        yield
        return
    _forget_gpu()
    yield
    _forget_gpu()


def _forget_gpu() -> None:
    """Compiled code, switches, groups and memory that this process has from an earlier test."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    torch.compiler.reset()  # a function is compiled anew only so many times, and then runs as it is
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.set_float32_matmul_precision("highest")
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    torch.cuda.set_device(0)
    torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


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
    monkeypatch.setattr("shardwise.run.block_times.BUDGET_S", 0.0)  # three turns are timed, not a second of them
    return lambda *words: int(main([str(word) for word in words]))


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Warm processes on the CPU: `ranks.run(function, 4, *args)` calls a function on four ranks that meet over gloo."""
    from ranks import RankPool

    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture
def repeatable_on_gpu(clean_gpu: None) -> None:
    """Kernels that add in the order threads arrive (an index's backward) would differ from themselves in bf16."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
