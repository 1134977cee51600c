"""Lays out the lines and tables of `shardwise plan`: lines that hang behind a label, columns that give way before
layouts are folded."""

from __future__ import annotations

import textwrap

from rich import box
from rich.table import Table

from shardwise.terminal import COPIED, LABEL, make_console, say_on

WIDTH = 120
LAYOUT = 30  # characters that a layout should have before it is folded
LESS_NEEDED = ("tok/s/GPU", "waits for", "cost", "training", "micro", "MFU", "p10-p90", "GPUs", "change", "GiB")
"""Columns that a narrow window goes without, the first one first."""


class View:
    """A terminal of a certain width, in characters."""

    def __init__(self) -> None:
        self.console = make_console()
        if not self.console.is_terminal:
            self.console.width = WIDTH
        self.width = min(WIDTH, self.console.width)

    def line(self, label: str, text: str) -> None:
        """Prints a labelled line; a long one hangs under its first word."""
        indent = " " * LABEL
        room = max(20, self.width - LABEL)
        rows = textwrap.wrap(text, room, break_on_hyphens=False, replace_whitespace=False, drop_whitespace=True) or [""]
        if len(text) <= room or label in COPIED:
            rows = [text]
        say_on(self.console, "\n".join([f"{label:<{LABEL}}{rows[0]}", *(indent + row for row in rows[1:])]))

    def table(self, table: Table) -> None:
        """Prints a table, without the spaces that fill up its lines where nobody sees colours."""
        if self.console.is_terminal:
            self.console.print(table)
            return
        with self.console.capture() as held:
            self.console.print(table)
        self.plain("\n".join(line.rstrip() for line in held.get().rstrip("\n").split("\n")))

    def plain(self, text: str) -> None:
        self.console.print(text, soft_wrap=True)

    def gap(self) -> None:
        self.console.print()


def table_of(columns: list[str], rows: list[dict[str, str]], width: int, memory: str = "GiB") -> Table:
    """Returns a table with words to the left and figures to the right. Only layouts are folded; columns that a narrow
    window has no room for are left out."""
    words = ("layout", "best layout", "what if")
    kept = columns
    for name in LESS_NEEDED:
        if _width(kept, rows, memory) <= width:
            break
        kept = [other for other in kept if other != name or other == columns[0]]
    made = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    for name in kept:
        left = name in words
        made.add_column(
            memory if name == "GiB" else name, justify="left" if left else "right", overflow="fold", no_wrap=not left
        )
    for row in rows:
        made.add_row(*(row[name] for name in kept))
    return made


def _width(columns: list[str], rows: list[dict[str, str]], memory: str) -> int:
    """Returns how many characters the columns take, with layouts of at most LAYOUT."""

    def of(name: str) -> int:
        widest = max(len(memory if name == "GiB" else name), *(len(row[name]) for row in rows))
        return min(widest, LAYOUT) if "layout" in name else widest

    return sum(of(name) + 3 for name in columns)
