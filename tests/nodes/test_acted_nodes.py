"""The machines that tests are acted out on are what they claim to be: each with a network, names, processes and files
of its own, and nothing of them is left, however the tests end."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from nodes import finish, until

ALL_REDUCE = """
import socket, sys, torch, torch.distributed as dist
store, rank, num_elements, interface = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
import os; os.environ["GLOO_SOCKET_IFNAME"] = interface
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
x = torch.full((num_elements,), rank + 1.0)
import time; start = time.monotonic(); dist.all_reduce(x)
print(f"sum {x[0].item():.0f} on {socket.gethostname()} in {time.monotonic() - start:.2f} s")
dist.destroy_process_group()
"""
TAKE_ALL = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
connection, _ = socket.create_server((sys.argv[1], 7000), family=family).accept()
count = 0
while got := connection.recv(65536):
    count += len(got)
print(count)
"""
SEND = "import socket, sys; socket.create_connection((sys.argv[1], 7000), 5).sendall(bytes(int(sys.argv[2])))"


def test_nodes_share_a_directory_if_told_and_nothing_else(nodes):
    a, b = nodes(2, shared=False)
    for node, other in ((a, b), (b, a)):
        (node.files / f"of-{node.name}").touch()
        seen = node.run(
            "sh", "-c", "hostname; cat /etc/hosts; ls; ls /dev/shm; ls /sys/class/net; ps -e -o comm= | wc -l"
        )
        assert seen.startswith(f"{node.name}\n") and f"127.0.1.1 {node.name}" in seen and f"of-{node.name}" in seen
        assert other.name not in seen
        assert all(name in seen.split() for name in ("eth0", "fast0", "docker0", "lo"))
        assert int(seen.split()[-1]) < 6, "processes of this machine"


def test_plain_torch_sums_over_two_nodes_through_the_interface_it_is_told(nodes):
    a, b = nodes(2)
    size, before = 1_000_000, {interface: a.sent_bytes(interface) for interface in ("eth0", "fast0")}
    commands = [
        node.start(sys.executable, "-c", ALL_REDUCE, f"tcp://{a.address}:7000", rank, size, "fast0")
        for rank, node in enumerate((a, b))
    ]
    assert finish(commands) == [0, 0], commands[0].story()
    assert "sum 3 on n1" in commands[0].output and "sum 3 on n2" in commands[1].output
    sent = {interface: a.sent_bytes(interface) - count for interface, count in before.items()}
    assert sent["fast0"] > 4 * size > 100 * sent["eth0"], sent


def test_every_address_of_a_node_is_reached_and_a_limited_link_is_slow(nodes):
    a, b = nodes(2)
    for address in (a.address, a.address6, a.address_on("fast0")):
        server = a.start(sys.executable, "-c", TAKE_ALL, address)
        until(lambda: a.listens_on(7000), "it listens", [server])
        b.run(sys.executable, "-c", SEND, address, 1)
        assert finish([server]) == [0]
    b.limit("16mbit")
    server = a.start(sys.executable, "-c", TAKE_ALL, a.address)
    until(lambda: a.listens_on(7000), "it listens", [server])
    start = time.monotonic()
    b.run(sys.executable, "-c", SEND, a.address, 4_000_000)
    assert finish([server]) == [0] and server.output == "4000000\n"
    assert time.monotonic() - start > 1.8, "4 MB at 2 MB/s"


def test_a_deadline_says_who_is_late_and_what_it_printed_last(nodes):
    a, b = nodes(2)
    commands = [a.start("sh", "-c", "echo as far as this; sleep 100"), b.start("echo", "done")]
    with pytest.raises(pytest.fail.Exception, match=r"not ended within 1 s: n1\n(.*\n)*.*as far as this") as failure:
        finish(commands, 1)
    assert "n2: echo done\n  ended with 0" in str(failure.value)
    with pytest.raises(pytest.fail.Exception, match="ended before it speaks: n2"):
        until(lambda: "words" in commands[1].output, "it speaks", commands[1:])


@pytest.mark.parametrize("how", ["the tests are killed", "the tests end"])
def test_nothing_of_a_node_is_left(how: str, tmp_path: Path):
    """Neither the processes on it, nor the one that acted as it, nor its network."""
    code = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from nodes import make_nodes
nodes = make_nodes(2, Path({str(tmp_path)!r}))
nodes[0].start("sh", "-c", "setsid sleep 1000 & sleep 1000")
print(*(node.pid for node in nodes), *(node.holder.pid for node in nodes), nodes[0].started[0].pid, flush=True)
sys.stdin.readline()
for node in nodes: node.close()
"""
    tests = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert tests.stdout and tests.stdin
    pids = tests.stdout.readline().split()
    assert len(pids) == 7 and all(Path("/proc", pid).exists() for pid in pids)
    network = {Path(f"/proc/{pid}/ns/net").readlink() for pid in pids[:3]}
    if how == "the tests end":
        tests.stdin.write("\n")
        tests.stdin.flush()
    else:
        tests.send_signal(signal.SIGKILL)
    tests.wait()
    end = time.monotonic() + 30
    while time.monotonic() < end and (left := still_there(pids, network)):
        time.sleep(0.05)
    assert not left


def still_there(pids: list[str], networks: set[Path]) -> list[str]:
    """Returns which of these processes live, and who uses one of these networks. One that has ended and that nobody has
    asked for its code yet does not."""
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
            uses = (process / "ns" / "net").readlink() in networks
            if state not in "ZX" and (process.name in pids or uses):
                left.append((process / "cmdline").read_text().replace("\0", " "))
    return left
