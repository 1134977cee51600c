"""Lays out what a demo shows: numbered steps of text, tables and drawings, and checks of counted figures against
formulas.

Invariant: nothing is wider than 100 columns, nothing is said by colour alone, and `to_dict` has the figures that `show`
prints.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

WIDTH = 100


@dataclass(frozen=True)
class Check:
    """A counted figure beside a formula and its numbers. A difference of at most `limit` still counts as equal."""

    what: str
    formula: str
    numbers: str
    expected: float
    counted: float
    limit: float = 0.0

    @property
    def holds(self) -> bool:
        return abs(self.counted - self.expected) <= self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "same": self.holds}

    def lines(self) -> str:
        sides = [side for side in (self.formula, self.numbers, number(self.expected)) if side]
        verdict = "same" if self.holds else "DIFFERENT"
        if self.holds and self.limit:
            verdict += f", {self.counted / self.expected - 1:+.1%}" if self.expected else f": below {self.limit:.0e}"
        return f"{self.what}\n    {' = '.join(dict.fromkeys(sides)):<54} counted {number(self.counted):>10}  {verdict}"


def same_as_one_process(difference: float, steps: int) -> Check:
    what = (
        f"largest difference of any loss, gradient or parameter from one process, {steps} "
        f"{'step' if steps == 1 else 'steps'}, fp64"
    )
    return Check(what, "0", "", 0.0, difference, 1e-9)


def on_the_wire(formula: str, numbers: str, expected: float, sent: list[int | None], of: str = "") -> list[Check]:
    """Returns a check of the bytes that left the ranks' sockets, where the system counts them. gloo adds headers to
    every transfer: up to 5 % of these small ones."""
    counted = [value for value in sent if value is not None]
    if not counted:
        return []
    what = f"{of}bytes that left a rank's sockets, as the system counts them, headers included"
    return [Check(what, formula, numbers, expected, sum(counted) / len(counted), 0.05 * expected)]


@dataclass
class Story:
    """What a demo tells, step by step."""

    word: str
    title: str
    steps: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)

    def step(self, heading: str, *parts: Any) -> None:
        """Adds a step. Its parts are paragraphs (str), tables, or drawings (Text)."""
        self.steps.append((heading, parts))

    @property
    def holds(self) -> bool:
        return all(check.holds for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "demo": self.word,
            **self.figures,
            "checks": [check.to_dict() for check in self.checks],
            "same": self.holds,
        }

    def show(self, console: Console) -> None:
        console.print(self.title, style="bold")
        for index, (heading, parts) in enumerate(self.steps, 1):
            console.print(f"\n{index}. {heading}", style="bold")
            for part in parts:
                console.print(_indented(part))
        console.print(
            f"\n{len(self.steps) + 1}. The formulas with the numbers put in, and what was counted", style="bold"
        )
        for check in self.checks:
            console.print(_indented(drawing(check.lines())))
        wrong = [check for check in self.checks if not check.holds]
        if not wrong:
            console.print(f"\nSAME     {len(self.checks)} of {len(self.checks)} figures are what the formulas say")
        for check in wrong:
            console.print(f"\nWRONG    {check.what}: counted {number(check.counted)}, not {number(check.expected)}")


def _indented(part: Any) -> Padding:
    return Padding(part, (0, 0, 0, 3), expand=False)


def make_console() -> Console:
    """Returns a console that is plain where output is piped or NO_COLOR is set: rich sees to that. A pipe has no width,
    so it gets ours."""
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = min(WIDTH, console.width) if console.is_terminal else WIDTH
    return console


def table(columns: list[str], rows: list[list[Any]], words: tuple[int, ...] = (0,)) -> Table:
    """Returns a table with figures to the right and the columns of `words` to the left."""
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index in words else "right")
    for row in rows:
        made.add_row(*(cell if isinstance(cell, str) else number(cell) for cell in row))
    return made


def drawing(text: str) -> Text:
    """Returns a drawing as it stands; in a window that is too narrow its lines are folded, not cut."""
    return Text(text, overflow="fold")


def number(value: float) -> str:
    """Returns a number as text: 1,234 for counts and large figures, two digits for the rest."""
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.2g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"
