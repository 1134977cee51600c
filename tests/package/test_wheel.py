"""The wheel: built from a copy of the source, installed into an empty folder, used far from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from commands import SMALL

ROOT = Path(__file__).parents[2]
PIP = ["-m", "pip", "--disable-pip-version-check"]


def python(*words: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built in a copy, because setuptools leaves its own files beside the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source / name)
    done = python(*PIP, "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, source, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    done = python(*PIP, "install", "--no-deps", "--no-index", "--target", target, wheel, cwd=target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_every_file_of_the_package_is_in_the_wheel(wheel):
    files = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/shardwise").rglob("*") if path.is_file()
    }
    files = {name for name in files if "__pycache__" not in name}
    carried = set(zipfile.ZipFile(wheel).namelist())
    assert files - carried == set()
    assert {
        "shardwise/spec/presets.toml",
        "shardwise/config/foreign.toml",
        "shardwise/explain/words/zero.toml",
    } <= carried
    assert "shardwise/py.typed" in carried


def test_the_wheel_carries_nothing_but_the_package(wheel):
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"shardwise"}


def test_installing_it_touches_nothing_else(wheel, tmp_path):
    """Every requirement is met by what is here: pip would install the wheel and leave torch as it is."""
    report = tmp_path / "report.json"
    done = python(*PIP, "install", "--dry-run", "--no-index", "--report", report, wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    changed = {item["metadata"]["name"] for item in json.loads(report.read_text())["install"]}
    assert changed <= {"shardwise"}


def test_it_runs_outside_the_checkout(installed, tmp_path):
    def run(*words: object) -> str:
        done = python(*words, cwd=tmp_path, PYTHONPATH=str(installed), OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = run("-c", "import shardwise; print(shardwise.__file__)").strip()
    assert Path(where).is_relative_to(installed), f"the checkout was imported instead: {where}"
    assert "usage: shardwise COMMAND" in run("-m", "shardwise", "--help")
    assert "zero: data parallelism" in run("-m", "shardwise", "explain", "zero")
    assert "llama3-8b" in run("-m", "shardwise", "explain", "presets")
    said = run("-m", "shardwise", "train", "--nproc", 1, *SMALL, "train.steps=2")
    assert "step 2/2" in said
    assert (tmp_path / "runs" / "tiny-001" / "checkpoints" / "step-2" / "manifest.json").is_file()
