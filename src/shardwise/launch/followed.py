"""Shows what the first rank prints where the standard output of this process is no terminal, pipe or file that another
process could write to: the cell of a notebook, or whatever a program has redirected it to.

The rank writes to files, as the others do, and they are read here while it trains. No torch.
"""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO


class Followed:
    """The first rank's two files; both empty names where it has the terminal for itself."""

    def __init__(self, log: Path, attempt: int, has_first: bool = True):
        """`has_first`: the first rank is one of this node's; else nothing is shown."""
        is_own = not has_first or (is_file(sys.stdout, 1) and is_file(sys.stderr, 2))
        self.out, self.err = ("", "") if is_own else (str(log / f"rank0.{attempt}.{end}") for end in ("out", "err"))
        self._read = {path: 0 for path in (self.out, self.err) if path}
        decoder = codecs.getincrementaldecoder("utf-8")
        self._decode: dict[str, Callable[[bytes], str]] = {path: decoder("replace").decode for path in self._read}

    def show(self) -> None:
        """Prints what has come since the last time."""
        for path, read in self._read.items():
            with suppress(FileNotFoundError), open(path, "rb") as file:
                file.seek(read)
                if new := file.read():
                    self._read[path] += len(new)
                    print(
                        self._decode[path](new), end="", file=sys.stdout if path == self.out else sys.stderr, flush=True
                    )


def is_file(stream: IO[str], number: int) -> bool:
    """Returns whether a stream writes to the file of this number, which processes that are started inherit."""
    try:
        return stream.fileno() == number
    except (AttributeError, OSError, ValueError):
        return False
