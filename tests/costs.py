"""How much CPU time each test takes, with all processes that it starts: `make test` ends with the slowest twenty.

CPU seconds say what a test costs whoever else uses the cores; wall time would say how busy they are. Each lane writes
one line per test to FOLDER/LANE.costs; `python tests/costs.py FOLDER` reads them and prints the page that is kept as
benchmarks/results/slowest_tests.md. Only Linux tells what the processes of a test used; elsewhere nothing is written.
"""

from __future__ import annotations

import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
USED = slice(11, 15)
"""Fields of /proc/PID/stat after the process's name: its own user and system time and those of children that it has
waited for."""
NUM_SHOWN = 20


class Cost(NamedTuple):
    """What one test took, in seconds."""

    test: str
    cpu_s: float
    wall_s: float


class Costs:
    """A plugin of pytest that measures every test of this lane."""

    def __init__(self, file: Path):
        self._file = file
        self._seen: dict[int, int] | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Writes what went into the test, its fixtures and whatever they left running since the test before."""
        start = time.monotonic()
        if self._seen is None:  # what collecting took is no test's
            self._used_since_last_time()
        result = yield
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{self._used_since_last_time():.2f}\t{time.monotonic() - start:.2f}\t{item.nodeid}\n")
        return result

    def _used_since_last_time(self) -> float:
        """Returns the CPU seconds that this process and its descendants used since this was asked last."""
        now = _ticks_by_process()
        # A process that has ended since is in its parent's account, so only what it had used before must be taken off.
        used = sum(now.values()) - sum((self._seen or now).values())
        self._seen = now
        return max(0, used) / TICKS_PER_S


def _ticks_by_process() -> dict[int, int]:
    """Returns the clock ticks used by this process and each of its descendants, waited-for children included."""
    found: dict[int, int] = {}
    open_ones = [os.getpid()]
    while open_ones:
        process = open_ones.pop()
        with suppress(OSError):  # it has ended
            stat = (PROC / f"{process}/stat").read_text(encoding="utf-8", errors="replace")
            found[process] = sum(map(int, stat.rpartition(")")[2].split()[USED]))
            for thread in os.listdir(PROC / f"{process}/task"):
                with suppress(OSError):
                    open_ones += map(int, (PROC / f"{process}/task/{thread}/children").read_text().split())
    return found


def measure(config: pytest.Config) -> None:
    """Measures the tests of this lane, if it is one, where the kernel lists the children of a process."""
    lane, folder = config.getoption("--lane"), config.getoption("--lanes-at")
    if lane is not None and folder is not None and (PROC / f"self/task/{os.getpid()}/children").exists():
        config.pluginmanager.register(Costs(folder.parent / f"{lane}.costs"))


def page(costs: list[Cost]) -> str:
    """Returns the slowest tests and the sums by folder, as Markdown."""
    slowest = sorted(costs, key=lambda cost: -cost.cpu_s)[:NUM_SHOWN]
    folders: dict[str, float] = defaultdict(float)
    for cost in costs:
        folders[cost.test.split("/")[1].split("::")[0]] += cost.cpu_s
    total = sum(folders.values())
    sums = ", ".join(f"{name} {cpu:.0f}" for name, cpu in sorted(folders.items(), key=lambda item: -item[1]))
    lines = [
        "# The slowest twenty tests",
        "",
        f"CPU seconds of each test with all its processes, and wall seconds, in one `make test` of {date.today()}.",
        "",
        "| test | CPU s | wall s |",
        "|---|---|---|",
        *(f"| {cost.test} | {cost.cpu_s:.1f} | {cost.wall_s:.1f} |" for cost in slowest),
        "",
        f"CPU seconds by folder: {sums}; sum {total:.0f}.",
    ]
    return "\n".join(lines)


def read(folder: Path) -> list[Cost]:
    """Returns what the lanes of a folder have written."""
    lines = [line for file in folder.glob("*.costs") for line in file.read_text(encoding="utf-8").splitlines()]
    return [Cost(test, float(cpu), float(wall)) for cpu, wall, test in (line.split("\t") for line in lines)]


if __name__ == "__main__":
    print(page(read(Path(sys.argv[1]))))
