"""Fixtures of the tests on nodes, which `make test-cluster` runs: real addresses, real schedulers, real failures."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import losses_of
from nodes import Node, environment, make_nodes, why_none
from slurm_cluster import Slurm, why_no_slurm
from training import train

MakeNodes = Callable[..., list[Node]]


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[MakeNodes]:
    """`nodes(2, shared=False)`: that many machines, gone with all that runs on them when the test ends. A test that
    fails shows what each of their commands printed last."""
    with machines(tmp_path) as make:
        yield make


@pytest.fixture
def slurm(nodes: MakeNodes) -> Slurm:
    """Two compute nodes and a controller under SLURM."""
    return slurm_on(nodes)


@pytest.fixture(scope="module")
def shared_slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """One SLURM for all tests of a file, which leave its nodes as they are."""
    with machines(tmp_path_factory.mktemp("slurm")) as make:
        yield slurm_on(make)


@contextmanager
def machines(folder: Path) -> Iterator[MakeNodes]:
    """Yields what makes nodes whose files are in a folder."""
    if reason := why_none():
        pytest.skip(reason)
    made: list[Node] = []

    def make(num_nodes: int, **options: object) -> list[Node]:
        assert not made, "a test has one set of nodes"
        made.extend(make_nodes(num_nodes, folder, **options))
        return made[:num_nodes]

    try:
        yield make
    finally:
        for node in made:
            node.close()
            for command in node.started:
                if not command.is_daemon:
                    print(command.story())


def slurm_on(make: MakeNodes) -> Slurm:
    """Returns a running SLURM on nodes of its own."""
    if reason := why_no_slurm():
        pytest.skip(reason)
    *compute, controller = make(3)
    running = Slurm(compute, controller, controller.cwd / "slurm")
    running.start()
    return running


@pytest.fixture(scope="session")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """The losses of the small run in one process of this machine."""
    folder = tmp_path_factory.mktemp("one")
    done = subprocess.run(train(), cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return losses_of(folder / "runs" / "tiny")
