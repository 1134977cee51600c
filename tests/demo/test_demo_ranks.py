"""What becomes of a demo's processes when something goes wrong: a rank that hangs, fails or dies, Ctrl-C, a killed
parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe

import pytest
from demo_processes import left_over, start_demo

from shardwise.demo.ranks import _collect
from shardwise.errors import UserError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

PLAY = """
import os, sys, time
from shardwise.demo.ranks import play
from shardwise.errors import UserError
from demo_processes import left_over
def ends():
    time.sleep(0.5)
def hangs():
    time.sleep(1000)
def fails():
    raise ValueError('no such scene')
def is_killed():
    os.kill(os.getpid(), 9)
def act(rank, world, say):
    say("the second act")
    if rank == 1:
        what()
    return 10 * rank
for what in (ends, hangs, fails, is_killed):
    print("SCENE", what.__name__)
    try:
        print("RESULT", play(act, 2, deadline_s=6 if what is hangs else 60))
    except UserError as error:
        print(error)
    except RuntimeError as error:
        print("BUG", error)
    print("LEFT", len(left_over(os.getpid())) - 1)
"""


@pytest.fixture(scope="module")
def scenes() -> dict[str, str]:
    """What the process that plays says of each scene. One process plays them all: a start takes longer than a scene."""
    process = subprocess.Popen(
        [sys.executable, "-c", PLAY],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    out, _ = process.communicate(timeout=180)
    assert process.returncode == 0, out
    return {name: said for name, said in (part.split("\n", 1) for part in out.split("SCENE ")[1:])}


@pytest.mark.parametrize("scene", ["ends", "hangs", "fails", "is_killed"])
def test_no_rank_lives_on_after_a_scene(scenes: dict[str, str], scene: str) -> None:
    assert scenes[scene].endswith("LEFT 0\n")


def test_what_ranks_return_arrives_in_their_order(scenes: dict[str, str]) -> None:
    assert "RESULT [0, 10]" in scenes["ends"]


def test_a_rank_that_hangs_is_named_with_what_it_does(scenes: dict[str, str]) -> None:
    assert "rank 1" in scenes["hangs"] and "did not finish within 6 s" in scenes["hangs"]
    assert "rank 1 is at: the second act" in scenes["hangs"]


def test_a_rank_that_fails_is_named_with_its_traceback(scenes: dict[str, str]) -> None:
    assert "BUG rank 1 failed at: the second act" in scenes["fails"]
    assert "ValueError: no such scene" in scenes["fails"]


def test_the_first_rank_that_fails_explains_those_that_lost_it() -> None:
    """On a busy machine all of them have failed before anybody looks, whatever their order."""
    for culprit in (0, 1):
        pipes = [Pipe(duplex=False) for _ in range(2)]
        for rank, (_, there) in enumerate(pipes):
            there.send(("doing", "the second act"))
            there.send(("failed", (1.0 if rank == culprit else 2.0, "ValueError")))
        with pytest.raises(RuntimeError, match=f"rank {culprit} failed at: the second act"):
            _collect([here for here, _ in pipes], time.monotonic() + 60, 60.0)


def test_a_rank_that_was_killed_is_named_though_its_peer_is_heard_first() -> None:
    """The system closes what a killed process had open in any order: its peers may have lost it already."""
    pipes = [Pipe(duplex=False) for _ in range(2)]
    pipes[0][1].send(("failed", (1.0, "RuntimeError: connection closed by peer")))
    threading.Timer(0.3, pipes[1][1].close).start()
    with pytest.raises(UserError, match="rank 1 of the demo was killed"):
        _collect([here for here, _ in pipes], time.monotonic() + 60, 60.0)


def test_a_rank_that_is_killed_is_named(scenes: dict[str, str]) -> None:
    assert "error: rank 1 of the demo was killed\n  why  it was at: the second act" in scenes["is_killed"]


@pytest.mark.parametrize(
    ("number", "to_all", "code"), [(signal.SIGINT, True, 130), (signal.SIGTERM, False, 75), (signal.SIGKILL, False, -9)]
)
def test_nobody_lives_on_after_a_signal(number, to_all, code):
    """Ctrl-C in a terminal reaches everybody; SIGKILL leaves the parent no time to tell the ranks."""
    process = start_demo("pipeline")
    end = time.monotonic() + 180
    while len(left_over(process.pid)) < 5 and time.monotonic() < end:
        time.sleep(0.05)
    assert len(left_over(process.pid)) == 5
    time.sleep(0.3)
    (os.killpg if to_all else os.kill)(process.pid, number)
    _, err = process.communicate(timeout=180)
    assert process.returncode == code
    assert "Traceback" not in err
    end = time.monotonic() + 60
    while left_over(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    assert left_over(process.pid) == []
