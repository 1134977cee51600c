"""What is started again and what is not, and when it is enough: over a run directory, without ranks. Ranks that start
again are in test_processes.py, those of several nodes in tests/nodes."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.errors import Exit
from shardwise.launch import restarts
from shardwise.launch.outcome import Failure, RanksEnded
from shardwise.launch.restarts import SAME_STEP, Restarts
from shardwise.run.guards import LOST_PEER
from shardwise.run.rundir import NUMBERS, RunDir, create_run_dir

KILLED = RanksEnded(failures=(Failure(1, -signal.SIGKILL, 1.0, doing="step 8, forward"), Failure(0, LOST_PEER, 2.0)))


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    """A run that has made seven steps, and waits for no pause."""
    monkeypatch.setattr(restarts, "LONGEST_PAUSE_S", 0.01)
    made = create_run_dir(tmp_path, "hurt", "tiny")
    made.config.write_text("")
    made.plan.write_text(json.dumps({"num_steps": 100}))
    for step in range(1, 8):
        step_on(made, step)
    return made


def step_on(run: RunDir, step: int) -> None:
    run.append({**dict.fromkeys(NUMBERS, 1.0), "step": step})


def checkpoint(run: RunDir, step: int) -> None:
    (run.checkpoints / f"step-{step}").mkdir()
    (run.checkpoints / f"step-{step}" / "manifest.json").write_text("{}")


def test_a_killed_rank_is_started_again_from_the_newest_checkpoint(run: RunDir, capsys: pytest.CaptureFixture[str]):
    checkpoint(run, 5)
    assert Restarts(run, 3).again(KILLED)
    said = capsys.readouterr().err
    assert "fault    KILLED: rank 1 was killed by SIGKILL in step 8, forward; rank 0 only lost it" in said
    assert "restart  1 of at most 3, from step 5 (2 steps, 2.00 s to make again)\n" in said
    event = run.last_event()
    assert event and (event["event"], event["step"], event["failed_at"], event["rank"]) == ("restarted", 5, 7, 1)


ENDED = {
    "somebody asked for it": (RanksEnded((signal.SIGTERM,), KILLED.failures), Exit.STOPPED),
    "memory that a rank found too small": (
        RanksEnded(failures=(Failure(1, 3, 1.0, "error: out of memory"), Failure(0, LOST_PEER, 2.0))),
        Exit.OUT_OF_MEMORY,
    ),
    "a mistake": (RanksEnded(failures=(Failure(1, 2, 1.0, "error: no such file"),)), Exit.USER_MISTAKE),
    "a bug": (RanksEnded(failures=(Failure(1, 6, 1.0, "error: oh"),)), Exit.BUG),
    "it has come to its end": (RanksEnded(), Exit.DONE),
}


@pytest.mark.parametrize("name", ENDED)
def test_what_would_come_back_or_was_asked_for_is_not_started_again(run: RunDir, name: str):
    ended, code = ENDED[name]
    again = Restarts(run, 3)
    assert not again.again(ended) and again.code == code


def test_as_often_as_asked_and_then_a_verdict(run: RunDir, capsys: pytest.CaptureFixture[str]):
    again = Restarts(run, 2)
    for last in (8, 9):
        assert again.again(KILLED)
        for step in range(1, last + 1):
            step_on(run, step)
    assert not again.again(KILLED) and again.code == Exit.HARDWARE
    lines = capsys.readouterr().err.splitlines()[-5:]
    assert lines[0].startswith("STOPPED  step 9 of 100") and "class KILLED, cause outside this run" in lines[0]
    assert "exit 5, resumable" in lines[0] and "it was started again 2 times (run.max_restarts)" in lines[2]
    assert lines[3] == "  lost   9 steps, 9.00 s; no checkpoint was committed yet"
    assert lines[4].startswith("  do     shardwise resume ")
    verdict = json.loads((run.crash / "verdict.json").read_text())
    assert (verdict["fault"], verdict["rank"], verdict["step"], verdict["saved"]) == ("KILLED", 1, 9, 0)
    assert run.state() == "failed"
    assert main(["watch", str(run.path), "--once"]) == Exit.DONE
    assert "class    KILLED: it was not sent from here" in (shown := capsys.readouterr().out), shown
    assert f"lost     {lines[3][9:]}" in shown and "restarts 2 so far" in shown


def test_a_run_that_keeps_failing_at_one_step_ends_whatever_is_left(run: RunDir, capsys: pytest.CaptureFixture[str]):
    checkpoint(run, 6)
    again = Restarts(run, 1000)
    for _ in range(SAME_STEP - 1):
        assert again.again(KILLED) and max(run.steps()) == 6
        step_on(run, 7)
    assert not again.again(KILLED)
    assert f"it has failed {SAME_STEP} times at this step" in capsys.readouterr().err


def test_a_signal_in_the_pause_ends_the_run(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(restarts, "LONGEST_PAUSE_S", 60.0)
    checkpoint(run, 7)
    again = Restarts(run, 9)
    assert again.again(KILLED)
    signal.signal(signal.SIGALRM, lambda number, frame: signal.raise_signal(signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    began = time.monotonic()
    assert not again.again(KILLED) and again.code == Exit.STOPPED
    assert time.monotonic() - began < 30 and run.state() == "stopped"


def test_a_run_whose_directory_is_gone_is_not_started_again(run: RunDir):
    run.config.unlink()
    again = Restarts(run, 3)
    assert not again.again(KILLED) and again.code == Exit.HARDWARE
