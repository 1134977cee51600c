"""Ctrl-C: at once where no step has begun, after the step where one has."""

from __future__ import annotations

import os
import signal
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
