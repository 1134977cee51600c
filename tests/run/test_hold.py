"""Two runs never write into one directory, and one that is removed is not made anew."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import SMALL

import shardwise
from shardwise.api.callbacks import StepInfo
from shardwise.api.training import RunFailed
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.run.hold import KnownDirectory
from shardwise.run.rundir import RunDir, create_run_dir


def test_a_run_is_held_although_somebody_removes_its_lock_file(tmp_path: Path):
    run = create_run_dir(tmp_path, "one", "tiny")
    assert not run.is_locked() and run.state() == "unfinished"
    with run.lock():
        (run.path / "lock").unlink()
        assert run.is_locked()
        with pytest.raises(UserError, match="already in use"):
            run.lock()
    assert not run.is_locked()
    with run.lock() as first, run.join_lock():
        first.close()
        assert run.is_locked(), "its ranks hold it too"


def test_a_run_whose_process_is_stopped_is_paused_and_says_who_holds_it(tmp_path: Path):
    run = create_run_dir(tmp_path, "one", "tiny")
    code = "import sys, time; from shardwise.run.rundir import RunDir; from pathlib import Path\n"
    code += "with RunDir(Path(sys.argv[1])).lock(): print('held', flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, run.path], stdout=subprocess.PIPE) as holder:
        assert holder.stdout and holder.stdout.readline() == b"held\n"
        try:
            assert run.state() == "running" and run.holder() == f"process {holder.pid} on {socket.gethostname()}"
            holder.send_signal(signal.SIGSTOP)
            deadline = time.monotonic() + 10
            while run.state() != "paused" and time.monotonic() < deadline:
                time.sleep(0.01)
            assert run.state() == "paused"
        finally:
            holder.kill()
    assert run.state() == "unfinished" and "left behind" in run.holder()


def test_a_directory_that_is_removed_or_replaced_is_noticed(tmp_path: Path):
    folder = tmp_path / "one"
    folder.mkdir()
    place = KnownDirectory(folder)
    place.check()
    os.rename(folder, tmp_path / "two")
    with pytest.raises(UserError, match="is gone"):
        place.check()
    folder.mkdir()
    with pytest.raises(UserError, match="is another one now"):
        place.check()


def test_a_run_whose_directory_is_removed_ends_and_makes_nothing_anew(workdir: Path, capfd: pytest.CaptureFixture[str]):
    def remove(step: StepInfo) -> None:
        if step.step == 3:
            shutil.rmtree(workdir / "runs/small")

    keys = ["run.name=small", "train.steps=100", "checkpoint.every=2", "parallel.dp=1"]
    loaded = load_config(None, [*SMALL, *keys]).config
    with pytest.raises(RunFailed):
        shardwise.train(loaded, callbacks=remove)
    assert "runs/small is gone" in capfd.readouterr().err
    assert not RunDir(workdir / "runs/small").path.exists()
