"""Counts the processes that the system has killed because memory ran out, so that such a kill is known and not guessed.

The kernel counts for every cgroup and for the whole machine. Whoever wants to know compares two counts.
"""

from __future__ import annotations

from pathlib import Path

MACHINE = Path("/proc/vmstat")
ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup/memory"))


def killed_for_memory() -> int:
    """Returns how many processes were killed so far in the cgroup of this process, or where it has none on this
    machine; 0 where the system does not say."""
    return next((count for file in (*_cgroup_files(), MACHINE) if (count := _count(file)) is not None), 0)


def _cgroup_files() -> list[Path]:
    """Returns the files that count in the cgroup of this process, of either version."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            name = "memory.oom_control" if controllers else "memory.events"
            found += [root / path.lstrip("/") / name for root in ROOTS] + [root / name for root in ROOTS]
    return found


def _count(file: Path) -> int | None:
    try:
        words = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return None
    return next((int(word[1]) for word in words if len(word) == 2 and word[0] == "oom_kill"), None)
