"""Shows the progress of a long pass over bytes on stderr: a bar on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

from shardwise.terminal import is_live, make_console, say_error

SECONDS_BETWEEN_LINES = 10.0


class ByteProgress:
    """Shows how far a pass is: `with ByteProgress("tokenising", total) as progress: progress(done_bytes)`. It is silent
    for work of under a second."""

    def __init__(self, what: str, total: int):
        self._what, self._total = what, total
        self._bar: Any = None
        self._began = self._said = time.monotonic()

    def __enter__(self) -> ByteProgress:
        return self

    def __call__(self, done: int) -> None:
        now = time.monotonic()
        if now - self._began < 1.0:
            return
        if not is_live(sys.stderr):
            if now - self._said >= SECONDS_BETWEEN_LINES:
                self._said = now
                say_error(self._line(done, now))
            return
        if self._bar is None:
            self._bar = _terminal_bar()
            self._bar.start()
            self._bar.add_task(self._what, total=self._total)
        self._bar.update(self._bar.task_ids[0], completed=done)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _line(self, done: int, now: float) -> str:
        rate = done / max(1e-9, now - self._began)
        share = f" of {self._total / 1e6:,.0f}" if self._total else ""
        return f"{self._what}  {done / 1e6:,.0f}{share} MB, {rate / 1e6:.1f} MB/s"


def _terminal_bar() -> Any:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=make_console(sys.stderr), transient=True)
