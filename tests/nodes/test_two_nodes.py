"""One run on several nodes, which are told by variables where they stand: the same losses, the same end, no stranger.

Names of hosts resolve to 127.0.1.1 on all of them.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

import pytest
from nodes import ROOT, Node, finish, until
from training import PORT, STEPS, check_same_losses, places, run_of, start_on, steps_of, train

from shardwise.errors import Exit


def test_a_notice_to_one_node_stops_all_and_three_nodes_without_a_common_directory_go_on_though_a_rank_is_killed(
    nodes, one_process
):
    """The first node's directory is the truth; the others have mirrors, and what they write comes to it."""
    a, b, c = nodes(3, shared=False)
    commands = start_on([a, b])
    until(lambda: steps_of(a) > 10, "step 10", commands, 90)
    beyond_loopback = {port for address, port in a.listening() if not address.startswith("127.")}
    assert all(address in (a.address, "127.0.0.1") for address, _ in a.listening())
    assert all(address in (b.address, "127.0.0.1") for address, _ in b.listening())
    assert PORT in beyond_loopback
    commands[1].signal(signal.SIGTERM)
    assert finish(commands, 60) == [Exit.STOPPED, Exit.STOPPED]
    stopped_at = steps_of(a)
    assert stopped_at < STEPS and (run_of(a) / "checkpoints" / f"step-{stopped_at}" / "manifest.json").is_file()
    assert not (run_of(b) / "checkpoints" / f"step-{stopped_at}").exists()
    assert (run_of(a) / "events" / "rank1.jsonl").stat().st_size > 0, "rank 1 is on the second node"

    commands = start_on([a, b, c])
    until(lambda: steps_of(a) > stopped_at + 5, "five steps more", commands, 90)
    [rank] = [line.split()[0] for line in c.processes() if "shardwise.launch.rank" in line]
    c.run("kill", "-9", rank)  # all nodes start their ranks again
    assert finish(commands, 120) == [0, 0, 0], commands[0].story()
    assert "restart  1 of at most 3" in commands[0].output and "rank 2 was killed by SIGKILL" in commands[0].output
    check_same_losses(a, one_process)
    assert (run_of(a) / "events" / "rank2.jsonl").stat().st_size > 0


def test_a_node_whose_agent_is_killed_or_whose_power_is_cut_is_named_and_the_others_end(nodes):
    a, b = nodes(2)
    commands = start_on([a, b], "checkpoint.every=20")
    until(lambda: steps_of(a) > 25, "a checkpoint", commands, 90)
    commands[1].signal(signal.SIGKILL)
    codes = finish(commands, 30)  # its rank saw that first and had all ranks commit, or the head did and named the node
    assert codes[0] in (Exit.STOPPED, Exit.HARDWARE) and codes[1] == -signal.SIGKILL, commands[0].story()
    assert "node 1 (n2) is gone" in commands[0].output
    until(lambda: not b.processes(), "no orphan on n2", [], 30)

    commands = start_on([a, b], "checkpoint.every=20")
    done = steps_of(a)
    until(lambda: steps_of(a) > done, "a step more", commands, 90)
    b.power_off()
    assert finish(commands[:1], 90) == [Exit.HARDWARE]
    assert "node 1 (n2)" in commands[0].output


def test_strangers_change_nothing_and_a_node_with_other_code_is_refused_on_both(nodes, tmp_path: Path):
    a, b, stranger = nodes(3)
    here, there = places([a, b])
    other = a.files / "other"
    shutil.copytree(ROOT / "src", other, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    (other / "shardwise" / "terminal.py").open("a").write("# changed\n")
    head = a.start(*train(), **here)
    until(lambda: a.listens_on(PORT), "the head listens", [head])
    knock = "import socket, sys; s = socket.create_connection((sys.argv[1], int(sys.argv[2])), 5); "
    stranger.run(sys.executable, "-c", knock + "s.sendall(b'GET / HTTP/1.0\\r\\n' * 99); s.recv(9)", a.address, PORT)
    silent = stranger.start(sys.executable, "-c", knock + "import time; time.sleep(60)", a.address, PORT)
    (stranger.files / "guessed").touch(mode=0o600)
    (stranger.files / "guessed").write_text("00" * 16)
    guessed = there | {"SHARDWISE_SECRET_FILE": stranger.cwd / "guessed"}
    stranger_agent = stranger.start(*train(), **guessed)
    assert finish([stranger_agent], 40) == [Exit.HARDWARE], stranger_agent.story()
    assert "secret" in stranger_agent.output and head.code is None and silent.code is None
    odd = b.start(*train(), **there | {"PYTHONPATH": b.cwd / "other"})
    assert finish([head, odd], 30) == [Exit.USER_MISTAKE] * 2
    for command in (head, odd):
        assert "node 1 (n2) has another code of shardwise than node 0 (n1)" in command.output, command.story()
    assert not run_of(a).exists()


def ports_to(node: Node) -> set[int]:
    """The ports of other machines to which this one has connections."""
    rows = Path(f"/proc/{node.pid}/net/tcp").read_text().splitlines()[1:]
    return {int(row.split()[2].split(":")[1], 16) for row in rows if row.split()[3] == "01"}


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, Exit.STOPPED), (signal.SIGUSR1, Exit.STOPPED), (signal.SIGINT, Exit.INTERRUPTED)],
)
def test_a_signal_to_one_node_ends_all_that_wait_for_another(nodes, number: signal.Signals, code: Exit):
    a, b, _ = placed = nodes(3)
    here, there, _ = places(placed)
    commands = [a.start(*train(), **here), b.start(*train(), **there)]
    until(lambda: PORT in ports_to(b), "n2 has come to n1", commands)
    commands[1].signal(number)
    assert finish(commands, 10) == [code, code], commands[0].story()
    assert "node 1 (n2): stopped by" in commands[0].output
    assert not run_of(a).exists() and not list(a.files.glob("runs/.*"))


def test_a_port_that_is_taken_and_a_head_that_is_localhost_are_refused_in_three_lines(nodes):
    a, b = nodes(2)
    here, there = places([a, b])
    serve = f"import socket, time; s = socket.create_server(('', {PORT})); time.sleep(60)"
    taken = a.start(sys.executable, "-c", serve)
    until(lambda: a.listens_on(PORT), "the port is taken", [taken])
    refused = [
        a.start(*train(), **here),
        b.start(*train(), **there | {"SHARDWISE_HEAD": "localhost"}),
        b.start(*train(), **there | {"SHARDWISE_HEAD": "n2"}),
        b.start(*train("comm.interface=ib0"), **there),
    ]
    codes = finish(refused, 30)
    for command, code, what in zip(
        refused, codes, ["cannot listen", "SHARDWISE_HEAD", "n2", "comm.interface"], strict=True
    ):
        assert code in (Exit.USER_MISTAKE, Exit.HARDWARE), command.story()
        lines = command.output.splitlines()
        assert what in lines[-3] and lines[-2].startswith("  why  ") and lines[-1].startswith("  fix  "), (
            command.story()
        )
    assert "eth0 (10.77.0.2)" in refused[3].output


def test_nodes_meet_by_version_6_and_compute_over_the_interface_they_are_told(nodes, one_process):
    a, b = nodes(2)
    before = {name: a.sent_bytes(name) for name in ("eth0", "fast0")}
    assert finish(start_on([a, b], "comm.interface=fast0", head=a.address6), 90) == [0, 0]
    check_same_losses(a, one_process)
    sent = {name: a.sent_bytes(name) - count for name, count in before.items()}
    assert sent["fast0"] > 5 * sent["eth0"], sent
