"""Remembers which batches of the data a run passes over: those that made it go back to an earlier checkpoint.

Batches are numbered from 1, in the order of the data. A step trains on the next batch that is not passed over. The
journal, `passed-over.jsonl`, has a line for each time the run went back; whoever resumes the run reads it and passes
over the same ones. Invariant: only batches behind the checkpoint that a run went back to are added, so what the steps
before it were trained on stays what it was; and all ranks pass over the same ones. No torch here.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.files import cannot_write
from shardwise.run.rundir import to_json


class PassedOver:
    """The numbers of the batches that are passed over."""

    def __init__(self, batches: Iterable[int] = ()):
        self.batches = set(batches)

    def number(self, step: int) -> int:
        """Returns the number of the batch that a step trains on; 0 for step 0."""
        number = step
        for passed in sorted(self.batches) if step else ():
            number += passed <= number
        return number

    def add(self, batches: Collection[int], journal: Path, line: dict[str, Any], *, writes: bool) -> None:
        """Passes over more batches from now on. The rank that `writes` adds a line on it to the journal first, which is
        on the disk before any later step is."""
        if writes and batches:
            try:
                with open(journal, "a", encoding="utf-8") as file:
                    file.write(to_json(line | {"batches": sorted(batches)}) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
            except OSError as error:
                raise cannot_write(journal, error) from None
        self.batches |= set(batches)


def batches_in(journal: Path) -> list[int]:
    """Returns the batches of all lines of a journal; none where there is no journal. A last line that was cut short was
    written before a kill, and followed by no step."""
    try:
        text = journal.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    try:
        return [int(number) for line in text.split("\n")[:-1] for number in json.loads(line)["batches"]]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(
            f"{journal} is damaged",
            why=f"it says which batches this run passes over, and has a line that cannot be read: {error}",
            fix="repair the line; or remove the file, and those batches are trained on",
        ) from None
