"""Reads the commands out of a document: the lines that start with `$ ` inside ```console blocks.

A command goes on over lines that end in a backslash, and through a here-document up to its closing word. Everything else in
such a block is output and is not compared: it comes from another machine. A command that is meant to end with another code
than 0 says so in a comment: `$ shardwise train parallel.tp=3  # exit 2`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\s*$")
HEREDOC = re.compile(r"<<'?(\w+)'?")
EXIT = re.compile(r"#\s*exit (\d+)")
SHELLS = ("console", "bash", "sh", "shell")


@dataclass(frozen=True)
class Command:
    text: str
    where: str  # file:line, for the message of a failing test

    @property
    def expected_exit(self) -> int:
        match = EXIT.search(self.text)
        return int(match[1]) if match else 0


def commands_of(document: Path) -> list[Command]:
    """Every command of a document, in order."""
    found: list[Command] = []
    language: str | None = None
    lines = iter(enumerate(document.read_text(encoding="utf-8").splitlines(), 1))
    for number, line in lines:
        fence = FENCE.match(line)
        if fence:
            language = fence[1] if language is None else None
        elif language in SHELLS and line.startswith("$ "):
            text = line[2:]
            while text.endswith("\\"):
                text = text[:-1] + next(lines)[1].strip()
            heredoc = HEREDOC.search(text)
            while heredoc and text.splitlines()[-1] != heredoc[1]:
                text += "\n" + next(lines)[1]
            found.append(Command(text, f"{document.name}:{number}"))
    assert language is None, f"{document} has a code block that is never closed"
    return found


def shells_without_prompt(document: Path) -> list[str]:
    """Shell blocks in which no line starts with `$ `: their commands would never be executed, so there must be none."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in blocks if language in SHELLS and not re.search(r"^\$ ", body, re.MULTILINE)]
