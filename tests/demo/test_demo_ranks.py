"""What becomes of a demo's processes when something goes wrong: a rank that hangs, fails or dies, Ctrl-C, a killed parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from demo_processes import left_over, start_demo

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PLAY = """
import os, sys, time
from shardwise.demo.ranks import play
from shardwise.errors import UserError
def act(rank, world, say):
    say("the second act")
    if rank == 1:
        {what}
    return 10 * rank
try:
    print("RESULT", play(act, 2, deadline_s={deadline}))
except UserError as error:
    print(error)
except RuntimeError as error:
    print("BUG", error)
"""


def outcome(what: str, deadline: float = 60) -> str:
    process = subprocess.Popen(
        [sys.executable, "-c", PLAY.format(what=what, deadline=deadline)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    out, _ = process.communicate(timeout=60)
    assert left_over(process.pid) == []
    return out


def test_what_ranks_return_arrives_in_their_order():
    assert "RESULT [0, 10]" in outcome("time.sleep(0.5)")


def test_a_rank_that_hangs_is_named_with_what_it_does():
    said = outcome("time.sleep(1000)", deadline=8)
    assert "rank 1" in said and "did not finish within 8 s" in said
    assert "rank 1 is at: the second act" in said


def test_a_rank_that_fails_is_named_with_its_traceback():
    said = outcome("raise ValueError('no such scene')")
    assert "BUG rank 1 failed at: the second act" in said and "ValueError: no such scene" in said


def test_a_rank_that_is_killed_is_named():
    assert "error: rank 1 of the demo was killed\n  why  it was at: the second act" in outcome(
        "os.kill(os.getpid(), 9)"
    )


@pytest.mark.parametrize(
    ("number", "to_all", "code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 75), (signal.SIGKILL, False, -9)]
)
def test_nobody_lives_on_after_a_signal(number, to_all, code):
    """Ctrl-C in a terminal reaches everybody; SIGKILL leaves the parent no time to tell the ranks."""
    process = start_demo("pipeline")
    end = time.monotonic() + 60
    while len(left_over(process.pid)) < 5 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(left_over(process.pid)) == 5
    time.sleep(0.3)
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert "Traceback" not in err
    while left_over(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert left_over(process.pid) == []
