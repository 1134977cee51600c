"""Reads a TOML file within limits, and finds where each of its keys stands.

`tomllib` gives values without positions. This scanner gives positions without values: it follows tables, dotted and
quoted keys, inline tables and values that span lines. Invariant: it never raises, so it can also point at the place in
a file that `tomllib` refuses. Read next: load.py.
"""

from __future__ import annotations

import re
import tomllib
from contextlib import suppress
from typing import Any

Path = tuple[str, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY_PART = re.compile(r"""[ \t]*(?:"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)'|([A-Za-z0-9_-]+))[ \t]*""")
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"""+' r"|'''.*?'''+" r'|"(?:\\.|[^"\\\n])*"' r"|'[^'\n]*'", re.DOTALL
)  # fmt: skip
_BARE = re.compile(r"[^,\]}\n#]*")

_LONG_KEY = re.compile(r"""(?<![\w-])(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){33}""")


def parse_toml(text: str) -> dict[str, Any]:
    """Returns what `tomllib` reads. Raises its TOMLDecodeError, or RecursionError for what nests without end: a key of
    very many names would take memory by the square of their number."""
    if _LONG_KEY.search(text):
        raise RecursionError("a key has more than 32 names")
    return tomllib.loads(text)


def key_lines(text: str) -> list[tuple[Path, int]]:
    """Returns every key of the file with its line (from 1), in file order; tables are listed too."""
    scanner = _Scanner(text)
    with suppress(RecursionError):  # nested without end: what stands before it is known
        scanner.file()
    return [(path, text.count("\n", 0, position) + 1) for path, position in scanner.found]


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.found: list[tuple[Path, int]] = []

    def file(self) -> None:
        table: Path = ()
        while True:
            self.blank()
            if self.position >= len(self.text):
                return
            if self.text[self.position] == "[":
                start = self.position
                while self.peek() == "[":
                    self.position += 1
                table = self.key_path()
                if table:
                    self.found.append((table, start))
                self.rest_of_line()
            elif not self.assignment(table):
                self.rest_of_line()

    def assignment(self, prefix: Path) -> bool:
        """Reads `key = value`, wherever it stands; returns False when this is something else."""
        start = self.position
        path = self.key_path()
        if not path:
            return False
        self.found.append((prefix + path, start))
        if self.peek() != "=":
            return False
        self.position += 1
        self.value(prefix + path)
        return True

    def key_path(self) -> Path:
        parts: list[str] = []
        while match := _KEY_PART.match(self.text, self.position):
            parts.append(next(group for group in match.groups() if group is not None))
            self.position = match.end()
            if self.peek() != ".":
                break
            self.position += 1
        return tuple(parts)

    def value(self, path: Path) -> None:
        while self.peek() in (" ", "\t"):
            self.position += 1
        if string := _STRING.match(self.text, self.position):
            self.position = string.end()
        elif self.peek() == "[":
            self.inside("]", lambda: self.value(path))
        elif self.peek() == "{":
            self.inside("}", lambda: self.assignment(path))
        elif bare := _BARE.match(self.text, self.position):
            self.position = bare.end()

    def inside(self, closing: str, entry) -> None:  # entry: reads one element
        self.position += 1
        while True:
            self.blank()
            before = self.position
            if self.peek() in (closing, ""):
                self.position += 1
                return
            if self.peek() == ",":
                self.position += 1
                continue
            entry()
            if self.position == before:  # not an element: step over it rather than stop here for ever
                self.position += 1

    def blank(self) -> None:
        match = _BLANK.match(self.text, self.position)
        assert match is not None, self.position
        self.position = match.end()

    def rest_of_line(self) -> None:
        end = self.text.find("\n", self.position)
        self.position = len(self.text) if end < 0 else end + 1

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]
