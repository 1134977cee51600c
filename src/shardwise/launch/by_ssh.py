"""Starts the nodes of a job over ssh, one process per host, and shows what they print.

What is secret goes over standard input, where no list of processes shows it. That input stays open: when this process
ends, however it ends, it closes, and the nodes save their state and stop. With `detach` they go on without it. Nothing
is copied but the config file, and only when it is asked for.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shardwise.errors import Exit, UserError
from shardwise.launch.head_address import is_loopback
from shardwise.launch.spec import LaunchSpec, in_shell

OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
UNREACHABLE = 255  # ssh's own exit code

RECEIVE = r"""umask 077
dir=$(mktemp -d) || exit 5
IFS= read -r secret || exit 5
printf '%s\n' "$secret" >"$dir/secret"
unset secret
while IFS= read -r line && [ -n "$line" ]; do export "${line?}"; done
export SHARDWISE_SECRET_FILE="$dir/secret"
"""

ATTACHED = r"""exec 3<&0
cd {folder} || {{ rm -rf "$dir"; exit 2; }}
{command} </dev/null &
node=$!
trap 'kill -TERM $node 2>/dev/null' TERM HUP INT
{{ cat <&3 >/dev/null; kill -TERM $node; }} 2>/dev/null &
input=$!
code=0
while :; do wait $node; code=$?; kill -0 $node 2>/dev/null || break; done
kill $input 2>/dev/null
rm -rf "$dir"
exit $code
"""

DETACHED = r"""cd {folder} || {{ rm -rf "$dir"; exit 2; }}
mkdir -p {logs} || {{ rm -rf "$dir"; exit 2; }}
log={logs}/{name}-node-"$SHARDWISE_NODE".log
export dir
setsid sh -c {inner} >"$log" 2>&1 </dev/null &
echo "started, prints to $log"
"""


@dataclass(frozen=True)
class SshOptions:
    """What a person says about the hosts."""

    hosts: tuple[str, ...]
    ssh: tuple[str, ...] = ("ssh",)
    program: tuple[str, ...] = ("shardwise",)
    folder: str = "."  # where the job works on each host
    head: str | None = None
    port: int = 0
    copy: bool = False
    detach: bool = False


def check_hosts(spec: LaunchSpec, options: SshOptions) -> None:
    """Refuses hosts that are not those that the plan needs."""
    if len(options.hosts) != spec.nodes:
        raise UserError(
            f"{len(options.hosts)} host{'s' if len(options.hosts) != 1 else ''} for {spec.nodes} nodes",
            why=spec.why["nodes"],
            fix=f"name {spec.nodes} hosts with commas between, or plan for {len(options.hosts)}",
        )
    if len(set(options.hosts)) < len(options.hosts):
        raise UserError("a host is named twice", why="each is one node of the plan", fix="name every host once")
    if wrong := next(
        (host for host in options.hosts if not re.fullmatch(r"[\w.@:\[\]-]+", host) or host[0] == "-"), None
    ):
        raise UserError(f"`{wrong}` is no host", why="ssh would read it as something else", fix="h1,h2 or me@h1,me@h2")


def head_address(options: SshOptions) -> str:
    """Returns the address of the first host for the others: what the person says, or what ssh's configuration has."""
    address = options.head
    if address is None:
        done = subprocess.run([*options.ssh, "-G", options.hosts[0]], capture_output=True, text=True)
        named = re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE)
        address = named[1] if named else options.hosts[0].rpartition("@")[2]
    if len(options.hosts) > 1 and is_loopback(address):
        raise UserError(
            f"the first host's address is {address}",
            why="on every other host that is the host itself",
            fix="--head ADDRESS, as the other hosts reach it",
        )
    return address


def script(spec: LaunchSpec, options: SshOptions) -> str:
    """Returns what the shell of every host runs. It reads the secret, the variables and, if it is to be copied, the
    config file from its standard input."""
    part, lines = spec.parts[0], RECEIVE
    words = list(spec.command(part, options.program))
    if options.copy:
        size = len(spec.plan_text.encode())
        lines += f'head -c {size} >"$dir/{Path(part.file).name}"\n'
    command = in_shell(tuple(words))
    if options.copy:
        command = command.replace(shlex.quote(part.file), f'"$dir/"{shlex.quote(Path(part.file).name)}', 1)
    folder = shlex.quote(options.folder)
    if not options.detach:
        return lines + ATTACHED.format(folder=folder, command=command)
    inner = f'{command}; code=$?; rm -rf "$dir"; exit $code'
    return lines + DETACHED.format(
        folder=folder, logs=shlex.quote(f"{spec.run_dir}/.launch"), name=spec.name, inner=shlex.quote(inner)
    )


def given(
    spec: LaunchSpec, options: SshOptions, number: int, head: str, secret: str, environ: Mapping[str, str]
) -> bytes:
    """Returns what a host is given on its standard input before the job starts."""
    values = {
        "SHARDWISE_NODE": str(number),
        "SHARDWISE_NODES": str(spec.nodes),
        "SHARDWISE_HEAD": head,
        "SHARDWISE_PORT": str(options.port),
        **{name: environ[name] for name in spec.private if name in environ},
    }
    if odd := next((name for name, value in values.items() if "\n" in value), None):
        raise UserError(f"the value of {odd} has a line break", why="it is sent as a line", fix="leave it out")
    lines = [secret, *(f"{name}={value}" for name, value in values.items()), ""]
    return "\n".join(lines).encode() + b"\n" + (spec.plan_text.encode() if options.copy else b"")


class Hosts:
    """The connections of a job, one per host, in the order of its nodes."""

    def __init__(self, options: SshOptions, text: str, inputs: Sequence[bytes], show: Callable[[str], None]):
        self.options, self.show = options, show
        self._lock = threading.Lock()
        self.connections: list[subprocess.Popen[bytes]] = []
        width = max(map(len, options.hosts))
        for host, data in zip(options.hosts, inputs, strict=True):
            connection = subprocess.Popen(
                [*options.ssh, *OPTIONS, host, f"exec sh -c {shlex.quote(text)}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is ours: the connections stay until the nodes have saved
            )
            self.connections.append(connection)
            assert connection.stdin is not None and connection.stdout is not None
            with suppress(BrokenPipeError):  # ssh has given up; what it says comes below
                connection.stdin.write(data)
                connection.stdin.flush()
            threading.Thread(target=self._copy, args=(f"{host:<{width}}", connection.stdout), daemon=True).start()

    def _copy(self, name: str, stream: IO[bytes]) -> None:
        for line in stream:
            with self._lock:
                self.show(f"{name} | {line.decode('utf-8', 'replace').rstrip()}")

    def let_go(self) -> None:
        """Closes the standard inputs: attached nodes save their state and end."""
        for connection in self.connections:
            with suppress(OSError):
                assert connection.stdin is not None
                connection.stdin.close()

    def wait(self) -> int:
        """Waits until all hosts have ended and returns the exit code of the job. A host that cannot be reached ends the
        others; the first Ctrl-C or SIGTERM lets them save, the second one leaves them."""
        while any(connection.poll() is None for connection in self.connections):
            for connection in self.connections:
                with suppress(subprocess.TimeoutExpired):
                    connection.wait(0.1)
            if any(connection.poll() == UNREACHABLE for connection in self.connections):
                self.let_go()
        codes = [connection.returncode for connection in self.connections]
        lost = [host for host, code in zip(self.options.hosts, codes) if code == UNREACHABLE]
        if lost:
            raise UserError(
                f"ssh has lost {', '.join(lost)} or never reached it",
                why="its own words stand above; it is asked for no password here",
                fix=f"try `ssh -o BatchMode=yes {lost[0]} true` until it works",
                code=Exit.HARDWARE,
            )
        return codes[0] or next((code for code in codes if code), 0)

    def kill(self) -> None:
        for connection in self.connections:
            with suppress(ProcessLookupError):
                os.killpg(connection.pid, signal.SIGKILL)
