"""Holds the errors for people, and the exit codes of every verb.

A `UserError` is a mistake the person at the keyboard can fix. It prints as three lines (what, why, fix), never as a
traceback. Anything else that escapes is a bug of ours and exits with 6.
"""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class Exit(IntEnum):
    """The exit codes: what a shell, a scheduler or a launcher learns from the end of a process."""

    DONE = 0
    FOUND_WRONG = 1
    USER_MISTAKE = 2
    OUT_OF_MEMORY = 3
    DIVERGED = 4
    HARDWARE = 5
    BUG = 6
    STOPPED = 75
    INTERRUPTED = 130


class UserError(Exception):
    """What happened, why, and what to type instead. `where` is an optional `file:line`."""

    def __init__(self, what: str, *, why: str, fix: str, where: str | None = None, code: Exit = Exit.USER_MISTAKE):
        super().__init__(what)
        self.what, self.why, self.fix, self.where, self.code = what, why, fix, where, code

    def __str__(self) -> str:
        first = f"error: {self.what}"
        if self.where:
            first = f"{first}{' ' * max(2, 72 - len(first))}{self.where}"
        return f"{first}\n  why  {self.why}\n  fix  {self.fix}"

    def _render_traceback_(self) -> list[str]:
        """Returns what IPython shows in a traceback's place: a mistake in a cell is mended in the cell."""
        return str(self).splitlines()

    def __reduce__(self):  # keyword-only arguments need help to cross a process boundary
        return _rebuild, (self.what, self.why, self.fix, self.where, self.code)


def _rebuild(what: str, why: str, fix: str, where: str | None, code: Exit) -> UserError:
    return UserError(what, why=why, fix=fix, where=where, code=code)


@contextmanager
def in_part_of_program(name: str) -> Iterator[None]:
    """Answers what a function or an object of a person's program raises with its line in their program: it is no bug of
    ours. What our code raises when theirs calls it, and memory that ends, stay what they are."""
    try:
        yield
    except (UserError, MemoryError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[1:]
        ours = [frame.filename.startswith(os.path.dirname(__file__) + os.sep) for frame in frames]
        if type(error).__name__ == "OutOfMemoryError" or (False in ours and True in ours[ours.index(False) :]):
            raise
        theirs = [frame for frame, is_ours in zip(frames, ours, strict=True) if not is_ours and _is_program(frame)]
        raise UserError(
            f"{name} raised {type(error).__name__}: {(str(error).splitlines() or ['without a word'])[0]}",
            why=f"`{name}` is of this program, and its error is not one of shardwise",
            fix="mend it there; a run's crash directory has the whole traceback",
            where=f"{theirs[-1].filename}:{theirs[-1].lineno}" if theirs else None,
        ) from error


def _is_program(frame: traceback.FrameSummary) -> bool:
    """Returns whether a frame is of nobody's library."""
    return "site-packages" not in frame.filename and not frame.filename.startswith(sysconfig.get_path("stdlib"))
