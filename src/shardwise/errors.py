"""Holds the errors for people, and the exit codes of every verb.

A `UserError` is a mistake the person at the keyboard can fix. It prints as three lines (what, why, fix), never as a
traceback. Anything else that escapes is a bug of ours and exits with 6.
"""

from __future__ import annotations

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

    def __reduce__(self):  # keyword-only arguments need help to cross a process boundary
        return _rebuild, (self.what, self.why, self.fix, self.where, self.code)


def _rebuild(what: str, why: str, fix: str, where: str | None, code: Exit) -> UserError:
    return UserError(what, why=why, fix=fix, where=where, code=code)
