"""Follows a job from anywhere that sees its run directory: the logs of all ranks, merged line by line as they come."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from shardwise.run.rundir import RunDir

LOOK_EVERY_S = 1.0


class MergedLogs:
    """The log files of a run, of all ranks and attempts, read from where the last look ended."""

    def __init__(self, log: Path):
        self.log = log
        self._read: dict[Path, int] = {}

    def lines(self, to_the_end: bool = False) -> Iterator[str]:
        """Yields what has come since the last time, in whole lines with the rank before each; with `to_the_end` also a
        last line that nobody has ended."""
        for path in sorted(self.log.glob("*.out")) + sorted(self.log.glob("*.err")):
            with suppress(OSError), path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                new = file.read()
                whole = new if to_the_end else new[: new.rfind(b"\n") + 1]
                self._read[path] = self._read.get(path, 0) + len(whole)
                for line in whole.decode("utf-8", "replace").splitlines():
                    yield f"{_who(path)} | {line}"


def follow(run: RunDir, is_queued: Callable[[], bool], show: Callable[[str], None]) -> str:
    """Shows the logs of a run for as long as its scheduler has the job, restarts included, and returns its state."""
    logs = MergedLogs(run.log)
    while True:
        is_over = not is_queued()
        for line in logs.lines(to_the_end=is_over):
            show(line)
        if is_over:
            return run.state() if run.config.is_file() else "never started"
        time.sleep(LOOK_EVERY_S)


def _who(path: Path) -> str:
    match = re.match(r"(rank|node)-?(\d+)", path.name)
    return f"{match[1]} {match[2]:>3}" if match else path.stem
