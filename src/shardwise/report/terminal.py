"""Shows a run while it goes on: a live block on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from shardwise.terminal import is_live, make_console, rows_of, say, say_on

if TYPE_CHECKING:
    from rich.live import Live
    from rich.text import Text

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """Returns how a number developed as one line of bars; the newest value is at the right. A value that is not finite
    leaves no bar."""
    values = [value for value in values if math.isfinite(value)]
    if not values:
        return ""
    if len(values) > width:  # means of equal stretches
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


class LiveView:
    """The terminal of one rank: lines that stay, and a block below them that is drawn anew."""

    def __init__(self, num_steps: int, unigram: float | None, quiet: bool = False):
        self.num_steps, self.unigram, self.quiet = num_steps, unigram, quiet
        self.losses: list[float] = []
        self.recent: deque[tuple[float, float, float]] = deque(maxlen=20)  # step_s, tokens, data_wait_s
        self.live: Live | None = None
        self.last_print = 0.0
        self.below = ""  # more lines of the live block

    def say(self, line: str) -> None:
        """Prints a line that stays."""
        if self.quiet:
            return
        if self.live:
            say_on(self.live.console, line)
        else:
            self._print(line)

    def step(self, line: dict[str, Any], is_timed: bool = True) -> None:
        """Shows a step. `is_timed` says that nothing was measured in it that takes time itself: rate and ETA are those
        of timed steps after the first, which warms up and compiles."""
        self.losses.append(line["loss"])
        if is_timed and len(self.losses) > 1:
            self.recent.append((line["step_s"], line["tokens"], line["data_wait_s"]))
        if self.quiet:
            return
        if is_live():
            self._draw(line)
            return
        now, step = time.monotonic(), line["step"]
        if step in (1, self.num_steps) or step % max(1, self.num_steps // 10) == 0 or now - self.last_print > 30:
            self.last_print = now
            self._print(self._line(line))

    def _draw(self, line: dict[str, Any]) -> None:
        """Draws the live block. It begins with the first step, so that the header stays above it, and stays after the
        last."""
        from rich.text import Text

        if self.live is None:
            from rich.live import Live

            self.live = Live(console=make_console(), refresh_per_second=8, transient=False)
            self.live.start()
            atexit.register(self.close)  # however the run ends, the terminal gets its cursor back
        rows = [self._bar(line["step"]), *rows_of(self._line(line), self.live.console)]
        rows += [row for one in self.below.splitlines() for row in rows_of(one, self.live.console)]
        self.live.update(Text("\n", no_wrap=True, overflow="crop").join(rows))
        if line["step"] == self.num_steps:
            self.close()

    def _print(self, line: str) -> None:
        """Prints a line. A reader that goes away, as in `shardwise train | head -1`, does not stop a run."""
        try:
            say(line)
        except BrokenPipeError:
            self.quiet = True
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _line(self, line: dict[str, Any]) -> str:
        seconds = sum(step_s for step_s, _, _ in self.recent)
        unigram = f"  (unigram {self.unigram:.2f})" if self.unigram else ""
        begun = f"step {line['step']:>{len(str(self.num_steps))}}/{self.num_steps}  loss {line['loss']:.3f}{unigram}  "
        if not self.recent:
            return f"{begun}{line['step_s']:.2f} s, warming up"
        rate = sum(tokens for _, tokens, _ in self.recent) / seconds
        wait = 100 * sum(waited for _, _, waited in self.recent) / seconds
        eta = (self.num_steps - line["step"]) * seconds / len(self.recent)
        return f"{begun}{format_rate(rate)} tok/s  data wait {wait:.1f} %  eta {format_eta(eta)}"

    def _bar(self, step: int) -> Text:
        """Returns how far the run is, and how its loss developed."""
        from rich.text import Text

        width = 40
        done = round(width * step / self.num_steps)
        return Text.assemble(
            ("━" * done, "green"), ("─" * (width - done), "dim"), "  ", (sparkline(self.losses), "cyan")
        )

    def close(self) -> None:
        if self.live:
            self.live.stop()
            self.live = None


def format_eta(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def format_rate(per_second: float) -> str:
    if per_second >= 1e6:
        return f"{per_second / 1e6:.1f}M"
    return f"{per_second / 1e3:.1f}k" if per_second >= 1e3 else f"{per_second:.0f}"
