"""What a person sees while a run goes on: a live block on a terminal, plain lines elsewhere. Rank 0 only."""

from __future__ import annotations

import sys
import time
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.live import Live

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 40) -> str:
    """The course of a number in one line of text; the newest value is at the right."""
    if len(values) > width:  # means of equal stretches
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(values), max(values)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((value - low) * scale)] for value in values)


class View:
    def __init__(self, num_steps: int, unigram: float | None, quiet: bool = False):
        self.num_steps, self.unigram, self.quiet = num_steps, unigram, quiet
        self.losses: list[float] = []
        self.recent: deque[tuple[float, float, float]] = deque(maxlen=20)  # step_s, tokens, data_wait_s
        self.live: Live | None = None
        self.last_print = 0.0
        if not quiet and sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(refresh_per_second=8, transient=False)
            self.live.start()

    def say(self, line: str) -> None:
        """A line that stays."""
        if self.quiet:
            return
        if self.live:
            self.live.console.print(line, markup=False, highlight=False)
        else:
            print(line, flush=True)

    def step(self, line: dict[str, Any]) -> None:
        self.losses.append(line["loss"])
        self.recent.append((line["step_s"], line["tokens"], line["data_wait_s"]))
        if self.quiet:
            return
        if self.live:
            from rich.text import Text

            self.live.update(Text(self._bar(line["step"]) + "\n" + self._line(line)))
            return
        now, step = time.monotonic(), line["step"]
        if step in (1, self.num_steps) or step % max(1, self.num_steps // 10) == 0 or now - self.last_print > 30:
            self.last_print = now
            print(self._line(line), flush=True)

    def _line(self, line: dict[str, Any]) -> str:
        seconds = sum(step_s for step_s, _, _ in self.recent)
        rate = sum(tokens for _, tokens, _ in self.recent) / seconds
        wait = 100 * sum(waited for _, _, waited in self.recent) / seconds
        eta = (self.num_steps - line["step"]) * seconds / len(self.recent)
        unigram = f"  (unigram {self.unigram:.2f})" if self.unigram else ""
        return (
            f"step {line['step']:>{len(str(self.num_steps))}}/{self.num_steps}  loss {line['loss']:.3f}{unigram}  "
            f"{format_rate(rate)} tok/s  data wait {wait:.1f} %  eta {format_eta(eta)}"
        )

    def _bar(self, step: int) -> str:
        width = 40
        done = round(width * step / self.num_steps)
        return f"[{'━' * done}{' ' * (width - done)}]  {sparkline(self.losses)}"

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
