"""Ctrl-C: at once where no step has begun, after the step where one has."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from shardwise.errors import Exit
from shardwise.run.guards import StopRequests
from shardwise.run.rundir import RunDir


def test_before_the_first_step_there_is_nothing_to_wait_for(tmp_path: Path) -> None:
    """Weights of a large model take minutes to build."""
    with StopRequests(RunDir(tmp_path), None, print), pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
        signal.sigtimedwait([], 5)  # the handler runs as soon as Python does


def test_a_step_that_has_begun_is_finished(tmp_path: Path) -> None:
    said: list[str] = []
    with StopRequests(RunDir(tmp_path), None, said.append) as stops:
        stops.has_begun = True
        os.kill(os.getpid(), signal.SIGINT)
        assert stops.check() == Exit.INTERRUPTED and stops.why == "Ctrl-C"
    assert "after this step" in said[0]


def test_the_second_ends_the_run_and_not_the_program_that_started_it(tmp_path: Path) -> None:
    """The process may be a notebook's, whose variables would be lost."""
    with StopRequests(RunDir(tmp_path), None, print) as stops:
        stops.has_begun = True
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_a_run_in_another_thread_leaves_signals_to_the_main_one(tmp_path: Path) -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def body() -> None:
        with StopRequests(RunDir(tmp_path), None, print) as stops:
            (tmp_path / "stop").write_text("the file")
            found.extend([stops.check(), stops.why, signal.getsignal(signal.SIGINT) is before])

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert found == [Exit.STOPPED, "the file", True]


ORPHAN = """
import os, time
from shardwise.run.guards import ending_with
launcher = os.getpid()
if os.fork() == 0:
    with ending_with(launcher):
        print("in set-up", flush=True)
        time.sleep(120)
    print("still there")
time.sleep(0.2)
os._exit(0)
"""


def test_a_rank_in_set_up_ends_with_its_launcher():
    """It has nothing to save, and may wait for minutes for ranks that never come."""
    done = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, "in set-up\n"), done.stderr  # the pipe closes when both have ended
