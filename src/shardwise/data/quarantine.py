"""Keeps rows that cannot be used away from training, each by its id, and lists them (`data.bad_rows = "quarantine"`).

A row's id is its place: file and line, or dataset and number. What is left out counts as a row without text, so all
others keep their order, as if it had been deleted. Invariant: nothing is left out without a line in the list, and never
so much that it is not a few bad rows any more but a wrong setting.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from shardwise.data.rows import Document
from shardwise.errors import UserError
from shardwise.files import cannot_write
from shardwise.terminal import counted

FILE = "quarantine.jsonl"
MOST_SHARE = 0.1  # of the rows that were read
FEW = 20  # rows that may be bad in any case, unless nothing else was read


class Quarantine:
    """The rows of all sources that cannot be used."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}  # by the row's id, in the order in which they were found
        self.num_rows = 0
        self._hear: Callable[[str, str], None] = lambda row, line: None

    def document(self, make: Callable[[], Document], origin: str, num_bytes: int) -> Document:
        """Returns the document that `make` makes of a row; one without text if it refuses it."""
        self.num_rows += 1
        try:
            return make()
        except UserError as error:
            row = error.where or origin
            if row not in self.lines:
                self._leave_out(row, error)
            return Document(origin, num_bytes, text="")

    def _leave_out(self, row: str, error: UserError) -> None:
        self.lines[row] = json.dumps({"row": row, "what": error.what, "why": error.why})
        if len(self.lines) > max(min(FEW, self.num_rows - 1), MOST_SHARE * self.num_rows):
            raise UserError(
                f"{counted(len(self.lines), 'row')} of {self.num_rows:,} cannot be used",
                why=f"that is more than a few bad ones; the last: {error.what} ({error.why})",
                fix=error.fix,
                where=row,
            ) from None
        self._hear(row, self.lines[row])

    def write(self, folder: Path) -> None:
        """Writes the list of a folder, if there is anything to list."""
        if self.lines:
            (folder / FILE).write_text("".join(f"{line}\n" for line in self.lines.values()), encoding="utf-8")

    def list_in(self, file: Path, say: Callable[[str], None]) -> None:
        """Adds to a list what was left out so far and what will be, with a line for people each; what it has already is
        not added again."""
        try:
            known = set(file.read_text(encoding="utf-8").splitlines()) if file.is_file() else set()
        except OSError as error:
            raise cannot_write(file, error) from None

        def hear(row: str, line: str) -> None:
            if line in known:
                return
            try:
                with open(file, "a", encoding="utf-8") as lines:
                    lines.write(f"{line}\n")
            except OSError as error:
                raise cannot_write(file, error) from None
            say(f"data     {row} cannot be used and is left out: {json.loads(line)['what']}; listed in {file}")

        self._hear = hear
        for row, line in list(self.lines.items()):
            hear(row, line)
