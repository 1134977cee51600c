"""Whatever ends one node's part of a job before its ranks start ends the other nodes too, at once and with its code."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from shardwise.errors import Exit, UserError
from shardwise.launch.local import JobEnds
from shardwise.launch.nodes import connection, interfaces, preflight
from shardwise.launch.nodes.agent import work_on_node
from shardwise.launch.nodes.checks import Checks
from shardwise.launch.nodes.connection import Background, NodeLink, framed
from shardwise.launch.nodes.follower import Follower
from shardwise.launch.nodes.head import MOST_KNOCKING, JobHead
from shardwise.launch.nodes.hello import hello
from shardwise.launch.nodes.job import NodeJob
from shardwise.launch.nodes.leader import Leader, note_excluded
from shardwise.launch.nodes.member import Member
from shardwise.launch.nodes.mirror import MOST_UNSENT, Outbox, send_written
from shardwise.launch.nodes.secret import new_secret, shared_secret
from shardwise.launch.place import NodePlace
from shardwise.run.rundir import RunDir

HERE = "127.0.0.1"
SECRET = new_secret()


class ToldToStop(BaseException):
    """What a signal raises."""


@pytest.fixture(autouse=True)
def _the_jobs_network_is_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "is_routable", lambda address: True)


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server((HERE, 0)) as free:
        number = free.getsockname()[1]
    yield number


def job_of(
    index: int, count: int, port: int, runs: Path, prepare: Callable[..., Any] = lambda machine: None
) -> NodeJob:
    return NodeJob(NodePlace("ssh", "job", index, count, (HERE,), port), "asked", None, runs, prepare)


def outcome(work: Callable[[], object]) -> tuple[threading.Thread, list[Any]]:
    """Runs one node's part in a thread; returns what it comes back with, or raises, in a list."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("no plan fits", why="w", fix="f", code=Exit.OUT_OF_MEMORY), Exit.OUT_OF_MEMORY, "no plan fits"),
        (OSError(28, "No space left on device", "/disk/config.toml"), Exit.USER_MISTAKE, "no room"),
        (KeyError("layers"), Exit.BUG, "KeyError"),
        (KeyboardInterrupt(), Exit.INTERRUPTED, "stopped by Ctrl-C"),
        (ToldToStop(), Exit.STOPPED, "stopped by SIGTERM"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_ends_the_head_ends_the_others_with_its_code_and_words(
    error: BaseException, code: Exit, said: str, port: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def prepare(machine: object) -> Any:
        raise error

    head, raised = outcome(lambda: Leader(job_of(0, 2, port, tmp_path, prepare), SECRET).work())
    member, codes = outcome(lambda: Member(job_of(1, 2, port, tmp_path), SECRET).work())
    member.join(30)
    head.join(10)
    assert raised == [error] and codes == [code]
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("code", [Exit.STOPPED, Exit.HARDWARE])
def test_a_node_that_leaves_while_others_are_awaited_ends_the_wait(code: Exit, port: int, tmp_path: Path):
    """With a word of its own, or without one: then it is gone."""
    head, raised = outcome(lambda: Leader(job_of(0, 3, port, tmp_path), SECRET).work())
    with Follower([HERE], port, SECRET, hello(1, "asked", 0) | {"host": "n1"}, 10) as leaving:
        if code == Exit.STOPPED:
            leaving.link.send("refuse", text="error: stopped by SIGTERM\n  why  w\n  fix  f", exit=int(code))
    head.join(10)
    assert [error.code for error in raised] == [code]
    assert raised[0].what == ("node 1 (n1): stopped by SIGTERM" if code == Exit.STOPPED else "node 1 (n1) is gone")


PEER = """
import sys
from shardwise.launch.nodes import interfaces
from shardwise.launch.nodes.follower import Follower
interfaces.is_routable = lambda address: True
with Follower(["127.0.0.1"], int(sys.argv[1]), bytes.fromhex(sys.argv[2]), {"index": 1, "host": "n1"}, 20):
    sys.stdin.read()
"""


def test_a_process_that_cannot_speak_is_told_apart_from_a_machine_that_is_gone(
    port: int, monkeypatch: pytest.MonkeyPatch
):
    """As one does not that loads a library from a slow disk, with the interpreter's lock held; here it is stopped."""
    monkeypatch.setattr(connection, "LOST_AFTER_S", 1)
    monkeypatch.setattr(connection, "PROBE_EVERY_S", 1)
    monkeypatch.setattr(connection, "ALIVE_EVERY_S", 0.1)
    with JobHead(HERE, port, 2, SECRET) as head:
        peer = subprocess.Popen([sys.executable, "-c", PEER, str(port), SECRET.hex()], stdin=subprocess.PIPE)
        while 1 not in head.links:
            assert peer.poll() is None, "it has not come"
            time.sleep(0.01)
        peer.send_signal(signal.SIGSTOP)
        time.sleep(2.5)
        assert head.links[1].lost == ""
        monkeypatch.setattr(connection, "STUCK_AFTER_S", 2.0)
        assert "machine answers, but its process has said nothing for 2 s" in head.links[1].lost
        peer.kill()
        peer.communicate()
        deadline = time.monotonic() + 10
        while not head.links[1].closed and time.monotonic() < deadline:
            time.sleep(0.01)
        assert head.links[1].lost == "its connection was closed"


def test_a_head_that_ends_the_job_while_a_node_fetches_its_files_is_heard(port: int, tmp_path: Path):
    with JobHead(HERE, port, 2, SECRET) as head:
        member, codes = outcome(lambda: Member(job_of(1, 2, port, tmp_path), SECRET).work())
        while 1 not in head.links:
            time.sleep(0.01)
        files = {"config.toml": 10}
        head.links[1].send("run", path=str(tmp_path / "mirror"), sign="none", files=files, digest="", text="")
        assert head.links[1].receive("get", timeout=10) is not None
        head.links[1].send("refuse", text="error: the disk of node 0 is full", exit=int(Exit.OUT_OF_MEMORY))
        member.join(10)
    assert codes == [Exit.OUT_OF_MEMORY]


def test_a_node_that_cannot_write_its_mirror_says_so_to_the_head(port: int, tmp_path: Path):
    (tmp_path / "run" / "config.toml").mkdir(parents=True)  # no file can have this name
    (tmp_path / "run" / ".mirror").write_text("n0")
    with JobHead(HERE, port, 2, SECRET) as head:
        member, raised = outcome(lambda: Member(job_of(1, 2, port, tmp_path), SECRET).work())
        while 1 not in head.links:
            time.sleep(0.01)
        files = {"config.toml": 1}
        head.links[1].send("run", path=str(tmp_path / "run"), sign="none", files=files, digest="", text="")
        assert head.links[1].receive("get", timeout=10) is not None
        head.links[1].send("piece", b"x")
        frame = head.links[1].receive("refuse", timeout=10)
        member.join(10)
    assert isinstance(raised[0], OSError)
    assert frame is not None and frame.words["exit"] == Exit.USER_MISTAKE and frame.words["text"].count("\n") == 2


def test_a_node_that_has_read_the_secret_of_an_earlier_start_reads_the_new_one(port: int, tmp_path: Path):
    file = tmp_path / "secret"
    stale = shared_secret(file, is_head=True)
    with JobHead(HERE, port, 2, shared_secret(file, is_head=True)) as head:
        way = Follower([HERE], port, stale, hello(1, "", 0), 10, lambda: shared_secret(file, is_head=False))
        with way:
            deadline = time.monotonic() + 10
            while 1 not in head.links and time.monotonic() < deadline:
                time.sleep(0.01)
        assert 1 in head.links


def test_a_second_job_by_hand_that_cannot_have_the_port_leaves_the_first_ones_secret(port: int, tmp_path: Path):
    file = tmp_path / f".secret-ssh-job-{port}-0"
    with JobHead(HERE, port, 2, lambda: shared_secret(file, is_head=True)) as first:
        with pytest.raises(UserError, match="cannot listen"):
            work_on_node(job_of(0, 2, port, tmp_path))
        assert shared_secret(file, is_head=False) == first.secret
        with socket.create_server((HERE, 0)) as free:
            other = free.getsockname()[1]
        head, raised = outcome(lambda: work_on_node(job_of(0, 2, other, tmp_path)))
        theirs = shared_secret(tmp_path / f".secret-ssh-job-{other}-0", is_head=False)
        with Follower([HERE], other, theirs, hello(1, "asked", 0), 10) as leaving:
            leaving.link.send("refuse", text="error: no\n  why  w\n  fix  f", exit=int(Exit.STOPPED))
            head.join(10)
        assert raised[0].code == Exit.STOPPED
        assert [one.name for one in tmp_path.glob(".secret*")] == [file.name], "a secret goes with its job"


def test_nodes_that_the_checks_have_named_stand_in_the_run_until_all_are_well(tmp_path: Path):
    """Under the names that the scheduler has for them."""
    hellos = {index: hello(index, "asked", 0, f"c{index}") for index in range(3)}
    report = preflight.Report(hellos, [preflight.Finding(2, "it is slow", "w", "f")])
    run = RunDir(tmp_path)
    note_excluded(run, report.excluded)
    assert run.exclude.read_text() == "c2\n"
    note_excluded(run, [])
    assert not run.exclude.exists()


def test_what_was_sent_last_arrives_where_the_other_side_is_slow_to_read():
    thread, (ours, theirs) = Background(), socket.socketpair()
    reader, writer = thread.call(asyncio.open_connection(sock=ours))
    link, num_bytes, got = NodeLink(thread, reader, writer), 0, 0
    while not link.num_unsent_bytes:
        link.send("written", bytes(1000))
        num_bytes += len(framed({"kind": "written"}, bytes(1000)))
        thread.call(asyncio.sleep(0))
    theirs.settimeout(1.0)
    leaving = threading.Thread(target=lambda: (link.flush(), thread.close()))
    leaving.start()
    time.sleep(0.2)
    with suppress(TimeoutError):
        while more := theirs.recv(2**16):
            got += len(more)
    leaving.join()
    assert got == num_bytes


def test_a_host_that_knocks_again_and_again_keeps_no_node_out(port: int):
    with JobHead(HERE, port, 2, SECRET) as head, ExitStack() as opened:
        silent = [
            opened.enter_context(socket.create_connection((HERE, port), 5, source_address=("127.0.0.2", 0)))
            for _ in range(MOST_KNOCKING + 40)
        ]
        for stranger in silent[-40:]:
            assert stranger.recv(100) == b"", "those beyond the limit are not answered"
        with Follower([HERE], port, SECRET, hello(1, "", 0), 5):
            deadline = time.monotonic() + 5
            while 1 not in head.links and time.monotonic() < deadline:
                time.sleep(0.01)
        assert 1 in head.links


def test_the_heads_last_word_counts_also_where_it_comes_while_ranks_run(port: int, tmp_path: Path):
    """The head does not wait for nodes that it has told to end where another one is gone."""
    with JobHead(HERE, port, 2, SECRET) as head:
        member = Member(job_of(1, 2, port, tmp_path), SECRET)
        with member.way:
            while 1 not in head.links:
                time.sleep(0.01)
            head.tell("end")
            head.tell("exit", code=int(Exit.STOPPED))
            with pytest.raises(JobEnds):
                while True:
                    member._attend()
            deadline = time.monotonic() + 5
            while member.last is None and time.monotonic() < deadline:
                with suppress(JobEnds):
                    member._attend()
            assert member.last is not None and member.last.words["code"] == Exit.STOPPED


def test_an_answer_that_comes_late_is_not_taken_for_that_to_the_next_question(
    port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(preflight, "ANSWER_S", 0.2)
    with JobHead(HERE, port, 3, SECRET) as head, ExitStack() as opened:
        ways = [opened.enter_context(Follower([HERE], port, SECRET, hello(index, "asked", 0), 5)) for index in (1, 2)]
        while len(head.links) < 2:
            time.sleep(0.01)
        checks = Checks(0, tmp_path, HERE, SECRET, head.thread)
        asked = preflight.Preflight({0: hello(0, "asked", 0), **head.hellos}, head.links, checks)
        assert asked._ask([1], "clock") == {} and "it did not answer" in asked.report.findings[0].why
        number = ways[1].link.receive("check", timeout=0.1)
        assert number is None, "only the first was asked"
        ways[1].link.send("checked", number=1, time=0.0)
        thread, found = outcome(lambda: asked._ask([1, 2], "port"))
        question = ways[1].link.receive("check", timeout=5)
        assert question is not None
        ways[1].link.send("checked", number=question.words["number"], port=7)
        thread.join(5)
    assert found[0][2]["port"] == 7 and 1 not in found[0]
    assert len(asked.report.findings) == 1, "who is silent is not asked again and again"


def test_a_runs_directory_without_room_is_a_finding(port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with JobHead(HERE, port, 1, SECRET) as head:
        checks = Checks(0, tmp_path / "runs", HERE, SECRET, head.thread)
        found = []
        for limit in (0, 2**70):
            monkeypatch.setattr(preflight, "LOW_SPACE", limit)
            asked = preflight.Preflight({0: hello(0, "asked", 0)}, head.links, checks)
            asked._directory()
            found.append([f"{one.what}; {one.fix}" for one in asked.report.findings])
            assert asked.report.excluded == [] and asked.report.is_shared
    assert found[0] == [] and "free; make room" in found[1][0] and str(tmp_path) in found[1][0]
    assert list((tmp_path / "runs").iterdir()) == []


def test_ranks_that_print_faster_than_the_network_carries_fill_no_memory(tmp_path: Path):
    thread, (ours, theirs) = Background(), socket.socketpair()
    reader, writer = thread.call(asyncio.open_connection(sock=ours))
    link, outbox = NodeLink(thread, reader, writer), Outbox(tmp_path)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "rank1.1.out").write_bytes(bytes(8 * MOST_UNSENT))
    for _ in range(5):
        send_written(link, outbox, is_last=False)
        thread.call(asyncio.sleep(0.05))
    assert MOST_UNSENT < link.num_unsent_bytes < 3 * MOST_UNSENT
    theirs.close()
    thread.close()
