"""Who holds the others up, by the signs of all ranks: a table. Real ranks that are stopped or killed are in
test_processes.py."""

from __future__ import annotations

import dataclasses
import faulthandler
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwise.errors import Exit
from shardwise.launch.judge import KNOWN_STEPS, QUICK_S, Patience, Sign, suspect
from shardwise.launch.memory_kills import killed_for_memory
from shardwise.launch.outcome import Failure, RanksEnded, cause_of, together
from shardwise.launch.signs import Watch, main_stack
from shardwise.run.clock import Span
from shardwise.run.guards import LOST_PEER
from shardwise.run.heartbeat import CELLS, STACK_SIGNAL, Heartbeat, Heartbeats, Pulse, heartbeat_of

STEP = ("all-reduce over dp", "all-reduce over world")
BUSY = Pulse(True, 9, "training", 12, 12, 99, 3, "forward", "compute", 5, (), STEP, 0.1)
WAITS = dataclasses.replace(BUSY, moves=5, doing=STEP[0], kind="comm_exposed", this_step=STEP[:1])
LONG = QUICK_S + 1
IN_TORCH = '  File "/x/torch/distributed/distributed_c10d.py", line 3 in all_reduce\n  File "/x/run/loop.py", line 1'


def sign(rank: int, pulse: Pulse, still_s: float = LONG, **about: object) -> Sign:
    return Sign(rank, pulse, still_s=still_s, **about)  # type: ignore[arg-type]


def another(pulse: Pulse, **changes: object) -> Pulse:
    return dataclasses.replace(pulse, **changes)  # type: ignore[arg-type]


OTHER_CALL = another(WAITS, doing=STEP[1], this_step=STEP[1:])
EARLY = another(BUSY, steps=KNOWN_STEPS)
CASES = {
    "all is well": ([sign(0, BUSY, 0.1), sign(1, WAITS, 0.1)], None),
    "it is stopped": ([sign(0, WAITS), sign(1, BUSY, 1.0, state="T", stopped_s=1.5)], (1, "stopped")),
    "it is stopped where it waits": ([sign(0, BUSY), sign(1, WAITS, 1.0, state="T", stopped_s=1.5)], (1, "stopped")),
    "no beat": ([sign(0, WAITS), sign(1, BUSY, beatless_s=LONG)], (1, "interpreter held")),
    "it sleeps and the others wait": ([sign(0, WAITS), sign(1, BUSY), sign(2, WAITS)], (1, "stuck")),
    "it waits inside of torch": ([sign(0, another(BUSY), stack=IN_TORCH), sign(1, BUSY, 8.0)], (1, "stuck")),
    "torch waits inside of backward": (
        [sign(0, another(BUSY, moves=9, doing="backward"), 9.0), sign(1, BUSY)],
        (1, "stuck"),
    ),
    "its steps are long": ([sign(0, WAITS), sign(1, another(BUSY, longest_s=5.0), 20.0)], None),
    "ten of its longest steps": ([sign(0, WAITS), sign(1, another(BUSY, longest_s=5.0), 51.0)], (1, "stuck")),
    "the first steps compile": ([sign(0, another(WAITS, steps=2)), sign(1, EARLY, 60.0)], None),
    "waiting for data": ([sign(0, WAITS), sign(1, another(BUSY, kind="data_wait"), 60.0)], None),
    "evaluating takes long": ([sign(0, WAITS), sign(1, another(BUSY, phase="evaluating", kind=""), 60.0)], None),
    "longer than comm.timeout": ([sign(0, WAITS), sign(1, another(BUSY, kind="data_wait"), 280.0)], (1, "stuck")),
    "another one was called": ([sign(0, WAITS), sign(1, OTHER_CALL), sign(2, WAITS)], (1, "another collective")),
    "one of two called another": ([sign(0, OTHER_CALL), sign(1, WAITS)], (0, "another collective")),
    "the network lost one": ([sign(0, WAITS), sign(1, WAITS)], (0, "network")),
    "not started yet": ([sign(0, Pulse(), 100.0), sign(1, WAITS, 0.1)], None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_rank_that_holds_the_others_up(name: str):
    signs, expected = CASES[name]
    found = suspect(signs, Patience(), is_whole=True)
    assert (found and (found.rank, found.fault)) == expected
    if expected == (1, "stuck") and len(signs) == 3:
        assert found and found.waiting == "ranks 0 and 2 only waited for it (all-reduce over dp, collective 5)"
        assert found.at == "step 12, forward"


def test_where_other_nodes_have_ranks_waiting_is_no_fault_of_ours():
    assert suspect([sign(0, WAITS), sign(1, WAITS)], Patience(), is_whole=False) is None
    assert suspect([sign(0, OTHER_CALL), sign(1, WAITS)], Patience(compiles=True), is_whole=True) is None


def test_a_heartbeat_says_what_its_rank_is_at_and_a_look_counts_what_it_could_have_done():
    with Heartbeats(2) as heartbeats, subprocess.Popen(["sleep", "60"]) as sleeper:
        watch = Watch(heartbeats, {5: os.getpid(), 7: sleeper.pid})
        heart = heartbeat_of(heartbeats.variable(1).rpartition(" ")[0] + f" {os.dup(heartbeats.descriptors[2])}")
        heart.step(3)
        outer, inner = Span("compute", "forward", 0, 0), Span("comm_exposed", "all-gather", 0, 0, group="shard")
        heart.opened(outer)
        heart.opened(inner)
        inside = watch.pulse(7)
        heart.closed(outer)
        after = watch.pulse(7)
        heart.step(4)
        assert (inside.step, inside.doing, inside.waits) == (3, "all-gather over shard", True)
        assert (after.doing, after.kind, after.this_step) == ("forward", "compute", ("all-gather over shard",))
        assert watch.pulse(7).last_step == after.this_step and watch.pulse(7).this_step == ()
        assert watch.pulse(5) == Pulse(), "each rank has a record of its own"
        os.kill(sleeper.pid, signal.SIGSTOP)
        watch.look()
        time.sleep(0.3)
        mine, stopped = watch.look()
        assert stopped.state == "T" and 0.2 < stopped.stopped_s < 5 and mine.stopped_s == 0
        assert stopped.still_s > 0.2
        assert stopped.beatless_s < stopped.still_s, "its thread here beats on"
        heart.opened(outer)
        assert watch.look()[1].still_s == 0
        sleeper.kill()
        faulthandler.unregister(STACK_SIGNAL)


HOLDS = """
import re, sys
from shardwise.run.heartbeat import heartbeat_of
heartbeat_of(sys.argv[1]).step(1)
print("up", flush=True)
sys.stdin.readline()
re.match("(a+)+$", "a" * 60 + "b")
"""


def test_one_call_that_holds_the_interpreter_ends_the_beat_and_its_stack_is_seen():
    with Heartbeats(1) as heartbeats:
        command, kept = [sys.executable, "-c", HOLDS, heartbeats.variable(0)], heartbeats.descriptors
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=kept) as process:
            try:
                assert process.stdin and process.stdout and process.stdout.readline() == b"up\n"
                watch = Watch(heartbeats, {0: process.pid})
                beats = watch.pulse(0).beat
                deadline = time.monotonic() + 60
                while watch.pulse(0).beat == beats and time.monotonic() < deadline:
                    time.sleep(0.02)
                assert watch.pulse(0).beat > beats, "it waits, and beats"
                process.stdin.write(b"\n")
                process.stdin.flush()
                while (seen := watch.look()[0]).beatless_s < 0.6 and time.monotonic() < deadline:
                    time.sleep(0.05)
                stack = main_stack(watch.stacks()[0])
            finally:
                process.kill()
    assert seen.beatless_s >= 0.6 and seen.still_s >= 0.6
    assert "in match" in stack and stack.index("in match") < stack.index("in <module>")


def test_noting_a_span_costs_a_few_microseconds():
    heart, span = Heartbeat(), Span("comm_exposed", "all-gather", 0, 0, group="shard")
    best = min(_seconds(heart, span) for _ in range(5))
    assert best < 20e-6, best
    assert heart.cells.nbytes == 8 * CELLS


def _seconds(heart: Heartbeat, span: Span) -> float:
    began = time.perf_counter()
    for _ in range(1000):
        heart.opened(span)
        heart.closed(None)
    return (time.perf_counter() - began) / 1000


KILLED, LOST = -signal.SIGKILL, LOST_PEER
ENDINGS = {
    "somebody killed it": ([Failure(1, KILLED, 2.0), Failure(0, LOST, 1.0)], 0, (1, "KILLED", Exit.HARDWARE)),
    "it was killed for memory": ([Failure(1, KILLED, 2.0)], 1, (1, "MEMORY", Exit.OUT_OF_MEMORY)),
    "it crashed": (
        [Failure(0, KILLED, 1.0, by_us=True), Failure(1, -signal.SIGSEGV, 2.0)],
        0,
        (1, "CRASH", Exit.HARDWARE),
    ),
    "all lost each other": ([Failure(1, LOST, 2.0), Failure(0, LOST, 1.0)], 0, (0, "NETWORK", Exit.HARDWARE)),
    "it has said why": ([Failure(1, Exit.OUT_OF_MEMORY, 2.0), Failure(0, KILLED, 3.0, by_us=True)], 0, None),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_what_ranks_died_of_and_never_of_a_signal_of_ours(name: str):
    failures, kills, expected = ENDINGS[name]
    cause = cause_of(RanksEnded(failures=tuple(failures), memory_kills=kills))
    assert (cause and (cause.rank, cause.fault, cause.code)) == expected


def test_what_another_node_sends_is_what_it_saw():
    own = RanksEnded(failures=(Failure(0, LOST, 1.0),), host="n0")
    signs = [sign(2, WAITS), sign(3, BUSY, 1.0, state="T", stopped_s=2.0)]
    there = RanksEnded(
        (), (Failure(3, KILLED, 2.0, by_us=True),), suspect(signs, Patience(), is_whole=False), host="n1"
    )
    assert RanksEnded.from_dict(there.to_dict()) == there
    cause = cause_of(together(own, [(there, False)], was_ended=True))
    assert cause and (cause.rank, cause.fault, cause.host) == (3, "STOPPED", "n1")


def test_kills_for_memory_are_counted_by_the_system():
    assert killed_for_memory() >= 0
    assert Path("/proc/vmstat").is_file()
