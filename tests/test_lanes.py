"""Lanes share the files of a run: every test is run by one of them, whatever the other one does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CONFTEST = """
import lanes, pytest
pytest_addoption = lanes.add_options
pytest_runtestloop = pytest.hookimpl(tryfirst=True)(lanes.run)

@pytest.fixture(scope="module")
def shared(request):
    yield
    print("END", request.module.__name__)
"""
FILE = """
import os, time
def test_one(shared): time.sleep({pause}); os.chdir("/")
def test_two(shared): assert {holds}
"""


def start(folder: Path, *words: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", *map(str, words)]
    return subprocess.Popen(
        command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={"PYTHONPATH": str(TESTS)}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "taken").mkdir()
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")  # nothing of a folder above
    for number in range(6):
        (tmp_path / f"test_{number}.py").write_text(FILE.format(pause=0.2, holds=number != 4))
    return tmp_path


def test_every_test_is_run_once_and_a_failure_is_somebodys(folder: Path) -> None:
    lanes = [start(folder, "--lane", lane, "--lanes-at", "taken") for lane in (1, 2)]
    said = [lane.communicate(timeout=120)[0] for lane in lanes]
    for number in range(6):
        assert sum(text.count(f"test_{number}.py::test_one PASSED") for text in said) == 1, said
        assert sum(text.count(f"test_{number}.py::test_two") for text in said) >= 1, said
        assert sum(text.count(f"END test_{number}") for text in said) == 1, "fixtures of a file end once"
    assert sorted(lane.returncode for lane in lanes) == [0, 1]


def test_one_lane_alone_runs_everything_from_its_end(folder: Path) -> None:
    lane = start(folder, "--lane", 2, "--lanes-at", "taken")
    said = lane.communicate(timeout=120)[0]
    assert lane.returncode == 1 and "11 passed" in said
    assert said.index("test_5.py::test_one") < said.index("test_0.py::test_one")


def test_without_lanes_pytest_runs_as_always(folder: Path) -> None:
    lane = start(folder)
    assert "11 passed" in lane.communicate(timeout=120)[0] and lane.returncode == 1
    assert not list((folder / "taken").iterdir())
