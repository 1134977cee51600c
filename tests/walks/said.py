"""What is never said, whoever asks and whatever happens: a traceback, a raw warning, a bug of ours, half an error."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from commands import caught

RAW = (
    r"Traceback \(most recent call last\)",
    r"^\[[WEF]\d{0,4}[ :\d]",  # torch's own log: [W1119 16:02:11 ...], [W socket.cpp:...]
    r"^[WEF]\d{4} ",
    r"\b\w*Warning: ",
    r"this is a bug of shardwise",
    r"\?{3,}",
)


def check_plain(said: str, errors: str, code: int) -> None:
    """Refuses output with a line that only a developer reads, and an error that is not what, why and fix."""
    for pattern in RAW:
        found = re.search(pattern, said, re.MULTILINE)
        assert found is None, f"{found[0]!r} in:\n{said}"
    if code in (2, 3, 5):
        lines = [line[:7] for line in errors.splitlines()]
        assert lines[-3:] == ["error: ", "  why  ", "  fix  "], errors
        assert said.count("error: ") == 1, said


def type_in(words: Sequence[str], encoding: str = "utf-8") -> tuple[int, str, str]:
    """Runs a command line in this process, on streams of an encoding: exit code, output, errors. What is written below
    Python, by torch or by ranks, is heard too. Variables that a command sets are of its process: here they go with
    it."""
    from shardwise.cli.main import main

    environment = dict(os.environ)
    with (
        _streams(encoding) as (stdout, stderr),
        caught(1, stdout, encoding) as out,
        caught(2, stderr, encoding) as err,
        _warnings_shown(),
    ):
        try:
            code = int(main(words))
        except SystemExit as ended:  # --help
            code = int(ended.code or 0)
        finally:
            os.environ.clear()
            os.environ.update(environment)
    return code, out[0], err[0]


@contextmanager
def _streams(encoding: str) -> Iterator[list]:
    """Standard output and error as streams on descriptors 1 and 2, in whose place pytest puts others."""
    before = sys.stdout, sys.stderr
    streams = [open(number, "w", encoding=encoding, closefd=False) for number in (1, 2)]  # noqa: SIM115
    sys.stdout, sys.stderr = streams
    try:
        yield streams
    finally:
        sys.stdout, sys.stderr = before


@contextmanager
def _warnings_shown() -> Iterator[None]:
    """Python's warnings go to standard error, as they do without pytest: those that a user would see."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda *about: sys.stderr.write(warnings.formatwarning(*about[:4]))
        warnings.simplefilter("default")
        for unseen in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", unseen)
        yield
