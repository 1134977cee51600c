"""Acts out machines on this one: each node is a set of namespaces with its own network, names, processes and files.

A node has two interfaces with real addresses, `eth0` (10.77.0.N, fd77::N) and `fast0` (10.88.0.N, fd88::N), each in a
network of all nodes, and a `docker0` whose address all nodes share, as real ones do. Its own name resolves to 127.0.1.1
unless told otherwise, which is what installers of Linux leave behind. Nothing of it can be reached from this machine.

Invariant: nothing outlives the tests, however they end. The kernel kills a node's first process when the tests' process
ends, everything on the node dies with its first process, and the networks go with the last process that used them.

Needs root, Linux, iproute2 and util-linux.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from ipaddress import ip_address
from itertools import count
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
INIT = Path(__file__).with_name("node_init.py")
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "setpriv": "util-linux"}
NETWORKS = {"eth0": 77, "fast0": 88}
"""The interfaces of every node, and the number of their network in its addresses."""
LISTEN = "0A"  # how /proc/net/tcp writes that state


@cache
def why_none() -> str | None:
    """Returns why no node can be acted out here and how to get one, or None where it can."""
    if not sys.platform.startswith("linux"):
        return "needs Linux: nodes are network namespaces"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        packages = " ".join(sorted({TOOLS[tool] for tool in missing}))
        return f"needs {', '.join(missing)}: apt-get install {packages}"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True, text=True)
    if tried.returncode:
        return f"needs root and the right to make namespaces ({tried.stderr.strip()}): run it as root"
    return None


class Command:
    """One command on one node. What it prints goes into a file, which can be read while it runs."""

    def __init__(self, node: Node, words: Sequence[object], log: Path, env: dict[str, str]):
        self.node, self.words, self.log = node, [str(word) for word in words], log
        self.is_daemon = False  # of a scheduler: not shown when a test fails by something else
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [*node.entered(), "env", "--default-signal=INT", f"--chdir={node.cwd}", *self.words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env,
            )

    @property
    def output(self) -> str:
        """What it has printed so far, errors included."""
        return self.log.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Its exit code, None while it runs, or minus the signal that ended it."""
        return self._process.poll()

    @property
    def pid(self) -> int:
        """Its number on this machine (the command's, not that of the one which entered the node for it)."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        while not (found := children.read_text().split()):  # it enters the node first
            time.sleep(0.01)
        return int(found[0])

    def signal(self, number: int) -> None:
        """Sends the command a signal, and nobody else."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it with its process group; what has left the group dies with the node."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def story(self, num_lines: int = 25) -> str:
        """Returns who this is, how it stands, and the last lines that it printed."""
        state = "still running" if self.code is None else f"ended with {self.code}"
        last = "\n".join(f"    {line}" for line in self.output.splitlines()[-num_lines:])
        return f"{self.node.name}: {' '.join(self.words)}\n  {state}; printed last:\n{last}"


@dataclass
class Node:
    """One machine: its first process, and what is known of it."""

    name: str
    number: int  # from 1; the last part of its addresses
    cwd: Path  # where its commands run, as the node sees it
    files: Path  # the same directory, as this machine sees it
    logs: Path
    pid: int  # of its first process, on this machine
    holder: subprocess.Popen[str]
    switch: Node | None = None
    started: list[Command] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: count(1))

    @property
    def address(self) -> str:
        """Its IPv4 address on the first network."""
        return self.address_on("eth0")

    @property
    def address6(self) -> str:
        """Its IPv6 address on the first network."""
        return f"fd{NETWORKS['eth0']}::{self.number}"

    def address_on(self, interface: str) -> str:
        """Returns its IPv4 address on an interface."""
        return f"10.{NETWORKS[interface]}.0.{self.number}"

    def entered(self) -> list[str]:
        """Returns the words that, before a command, run it on this node."""
        return ["nsenter", f"--target={self.pid}", "--mount", "--uts", "--ipc", "--net", "--pid", "--"]

    def start(self, *words: object, **env: object) -> Command:
        """Starts a command here, in `cwd`, and returns it."""
        log = self.logs / f"{self.name}-{next(self.numbers)}.log"
        command = Command(self, words, log, environment() | {name: str(value) for name, value in env.items()})
        self.started.append(command)
        return command

    def run(self, *words: object, within: float = 60.0, **env: object) -> str:
        """Runs a command here to its end and returns what it printed; a failure fails the test."""
        command = self.start(*words, **env)
        [code] = finish([command], within)
        assert code == 0, command.story()
        self.started.remove(command)  # it is no part of the story
        return command.output

    def limit(self, rate: str, interface: str = "eth0") -> None:
        """Limits what this node sends and receives to a rate in tc's words, for instance `20mbit`."""
        assert self.switch is not None
        words = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "200ms"]
        self._tool("tc", "qdisc", "replace", "dev", interface, *words)
        self.switch._tool("tc", "qdisc", "replace", "dev", f"{interface}-{self.number}", *words)

    def unplug(self) -> None:
        """Takes the node off its networks: what is sent to it is lost, nobody is told."""
        assert self.switch is not None
        for interface in NETWORKS:
            self.switch._tool("ip", "link", "set", f"{interface}-{self.number}", "down")

    def power_off(self) -> None:
        """Ends the node as a cut of its power does: the network is gone before its processes are."""
        self.unplug()
        self.close()

    def listening(self) -> set[tuple[str, int]]:
        """Returns the addresses and ports at which this node waits for connections."""
        found = set()
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.pid}/net/{table}").read_text().splitlines()[1:]:
                place, state = line.split()[1], line.split()[3]
                if state == LISTEN:
                    address, port = place.split(":")
                    words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                    found.add((str(ip_address(b"".join(words))), int(port, 16)))
        return found

    def listens_on(self, port: int) -> bool:
        """Returns whether this node waits for connections to a port."""
        return any(at == port for _, at in self.listening())

    def processes(self) -> list[str]:
        """Returns the command lines of what runs on this node, without its first process."""
        listing = [*self.entered(), "ps", "-e", "-o", "pid=,args="]
        lines = subprocess.run(listing, capture_output=True, text=True, check=True).stdout.splitlines()
        return [line for line in lines if line.split()[0] != "1" and "ps -e -o" not in line]

    def kill_all(self) -> None:
        """Kills every process on this node at once, as a crash of its system does; the node itself stays, empty."""
        subprocess.run([*self.entered(), "sh", "-c", "kill -9 -1"], check=True)

    def sent_bytes(self, interface: str) -> int:
        """Returns the bytes that have left this node through an interface."""
        return int(self._tool("cat", f"/sys/class/net/{interface}/statistics/tx_bytes"))

    def close(self) -> None:
        """Kills everything on the node."""
        self.holder.kill()  # the kernel then kills the node's first process, and it all the others
        self.holder.wait()
        for command in self.started:
            command.kill()
        if self.holder.stdout:
            self.holder.stdout.close()

    def _tool(self, *words: str, given: str | None = None) -> str:
        """Runs a tool of this machine's administrator on the node and returns what it printed."""
        entered = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--"]  # numbers of processes: this machine's
        done = subprocess.run([*entered, *words], input=given, capture_output=True, text=True)
        assert done.returncode == 0, f"{self.name}: {' '.join(words)}: {done.stderr}{given or ''}"
        return done.stdout


def environment() -> dict[str, str]:
    """Returns the environment of a command: that of a login, with this Python and this package."""
    system = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    return {
        "PATH": ":".join([str(Path(sys.executable).parent), *system]),
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT / "src"),
        "PYTHONUNBUFFERED": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_WAIT_POLICY": "PASSIVE",  # a thread that waits gives its core away: nodes share two of them
    }


def make_nodes(
    num_nodes: int,
    folder: Path,
    *,
    shared: bool = True,
    own_name: str | None = "127.0.1.1",
    hosts: Mapping[str, str] | None = None,
) -> list[Node]:
    """Returns that many new nodes, n1, n2, ..., on the same two networks, and behind them their switch.

    Their commands run in FOLDER/work: one directory for all, or one file system for each if not `shared`. `own_name` is
    what a node's own name resolves to, None for nothing. `hosts` are further names with their addresses.
    """
    switch = _first_process("switch", 0, folder, "", shared=True)
    nodes: list[Node] = []
    try:
        for number in range(1, num_nodes + 1):
            names = {"localhost": "127.0.0.1", **({f"n{number}": own_name} if own_name else {}), **(hosts or {})}
            text = "".join(f"{address} {name}\n" for name, address in names.items())
            nodes.append(_first_process(f"n{number}", number, folder, text, shared=shared, switch=switch))
        _connect(switch, nodes)
    except BaseException:
        for node in [*nodes, switch]:
            node.close()
        raise
    return [*nodes, switch]


def _first_process(
    name: str, number: int, folder: Path, hosts: str, *, shared: bool, switch: Node | None = None
) -> Node:
    """Returns a node that has its first process and no network yet."""
    work, logs = folder / "work", folder / "logs"
    files = work if shared else folder / f"work-{name}"
    for path in (work, files, logs):
        path.mkdir(exist_ok=True, parents=True)
    hidden = ("/tmp", "/run", "/root")
    python = (Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1])
    ours = [path for path in (ROOT, *python) if any(path.is_relative_to(over) for over in hidden)]
    given = {
        "name": name,
        "hosts": hosts,
        "kept": sorted({str(path) for path in (work, *ours)}),
        "replaced": {} if shared else {str(work): str(files)},
    }
    # setpriv's words: when whoever runs the tests dies, this process dies. Those of unshare: then the first one does.
    tied = ["setpriv", "--pdeathsig", "KILL", "unshare", "--fork", "--kill-child"]
    own = ["--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc"]
    holder = subprocess.Popen(
        [*tied, *own, sys.executable, str(INIT), json.dumps(given)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert holder.stdout is not None
    if (line := holder.stdout.readline()) != "ready\n":
        holder.kill()
        pytest.fail(f"node {name} did not come up:\n{line}{holder.stdout.read()}")
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
    return Node(name, number, work, files, logs, int(children[0]), holder, switch)


def _connect(switch: Node, nodes: Sequence[Node]) -> None:
    """Puts the nodes on the networks of a switch. Addresses serve at once: nobody checks whether another has them."""
    lines = [f"link add name {interface} type bridge\nlink set {interface} up" for interface in NETWORKS]
    for node in nodes:
        for interface in NETWORKS:
            port = f"{interface}-{node.number}"
            lines.append(f"link add {port} type veth peer name {interface} netns {node.pid}")
            lines.append(f"link set {port} master {interface} up")
    switch._tool("ip", "-batch", "-", given="\n".join(lines) + "\n")
    for node in nodes:
        lines = [
            "link set lo up",
            "link add docker0 type bridge",
            "addr add 172.17.0.1/16 dev docker0",
            "link set docker0 up",
        ]
        for interface, network in NETWORKS.items():
            lines.append(f"addr add 10.{network}.0.{node.number}/24 dev {interface}")
            lines.append(f"addr add fd{network}::{node.number}/64 dev {interface} nodad")
            lines.append(f"link set {interface} up")
        node._tool("ip", "-batch", "-", given="\n".join(lines) + "\n")


def finish(commands: Sequence[Command], within: float = 60.0) -> list[int]:
    """Waits for commands and returns their exit codes. After the deadline the test fails, with who still runs and what
    each printed last."""
    end = time.monotonic() + within
    while any(command.code is None for command in commands):
        if time.monotonic() > end:
            late = ", ".join(command.node.name for command in commands if command.code is None)
            _give_up(f"not ended within {within:.0f} s: {late}", commands)
        time.sleep(0.05)
    return [command.code or 0 for command in commands]


def until(holds: Callable[[], object], what: str, commands: Sequence[Command], within: float = 60.0) -> None:
    """Waits until something holds. The test fails after the deadline, or when a command has ended before."""
    end = time.monotonic() + within
    while not holds():
        if ended := [command.node.name for command in commands if command.code is not None]:
            if holds():
                return
            _give_up(f"ended before {what}: {', '.join(ended)}", commands)
        if time.monotonic() > end:
            _give_up(f"not within {within:.0f} s: {what}", commands)
        time.sleep(0.05)


def _give_up(why: str, commands: Sequence[Command]) -> None:
    stories = "\n".join(command.story() for command in commands)
    for command in commands:
        command.kill()
    pytest.fail(f"{why}\n{stories}", pytrace=False)
