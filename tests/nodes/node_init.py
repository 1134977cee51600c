"""The first process of an acted-out machine: gives it file systems of its own, then reaps what others leave behind.

nodes.py starts it as `unshare --net --uts --ipc --mount --pid ... python node_init.py JSON` and waits for its line
"ready". Invariant: whatever runs on the machine dies with this process, because it is the first of its PID namespace.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path

MS_BIND, MS_REC = 4096, 16384
LIBC = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str | None = None, flags: int = 0) -> None:
    """Mounts, and raises OSError with both names where the kernel refuses."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    if LIBC.mount(*words, ctypes.c_ulong(flags), None) != 0:
        raise OSError(ctypes.get_errno(), f"mount {source} on {target}: {os.strerror(ctypes.get_errno())}")


def bind(descriptor: int, target: str) -> None:
    """Makes an open file or directory appear at a path, also when its own path is hidden by now."""
    mount(f"/proc/self/fd/{descriptor}", target, flags=MS_BIND | MS_REC)


def own_file(target: str, content: str) -> None:
    """Gives this machine a text of its own in a file's place. The file behind it lies in the machine's own /run."""
    if not os.path.exists(target):
        return
    behind = Path("/run", target.strip("/").replace("/", "+"))
    behind.write_text(content)
    mount(str(behind), target, flags=MS_BIND)


def set_up(name: str, hosts: str, kept: list[str], replaced: dict[str, str]) -> None:
    """Makes /tmp, /run, /root, /dev/shm and /sys the machine's own; `kept` paths stay what they are for everybody, and
    a path of `replaced` shows another directory here."""
    socket.sethostname(name)
    opened = {path: os.open(path, os.O_PATH) for path in kept}
    opened |= {path: os.open(source, os.O_PATH) for path, source in replaced.items()}
    cgroups = os.open("/sys/fs/cgroup", os.O_PATH)
    mount("sysfs", "/sys", "sysfs")  # the one of the machine's own network: /sys/class/net lists its interfaces
    bind(cgroups, "/sys/fs/cgroup")
    for path in ("/tmp", "/run", "/root", "/dev/shm"):
        mount("tmpfs", path, "tmpfs")  # of mode 1777
    for path, descriptor in opened.items():
        os.makedirs(path, exist_ok=True)
        bind(descriptor, path)
    own_file("/etc/hosts", hosts)
    own_file("/etc/hostname", f"{name}\n")
    own_file("/etc/resolv.conf", "")  # names that are not in /etc/hosts do not resolve, and that at once


def main() -> None:
    """Sets the machine up, says so, and reaps for as long as it lives."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    set_up(**json.loads(sys.argv[1]))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    print("ready", flush=True)
    while True:
        signal.sigwait({signal.SIGCHLD})
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            continue


if __name__ == "__main__":
    main()
