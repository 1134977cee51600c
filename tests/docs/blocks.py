"""Reads the commands out of a document: the lines that start with `$ ` inside ```console blocks.

A command goes on over lines that end in a backslash, and through a here-document up to its closing word. Everything
else in such a block is output. That of `shardwise plan` and `launch` is the same on every machine, and may be shown in
part: test_commands.py compares it, and

    python tests/docs/blocks.py     writes it anew

A command that is meant to end with another code than 0 says so in a comment: `$ shardwise train parallel.tp=3  # exit
2`.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\s*$")
HEREDOC = re.compile(r"<<'?(\w+)'?")
EXIT = re.compile(r"#\s*exit (\d+)")
SHELLS = ("console", "bash", "sh", "shell")


@dataclass(frozen=True)
class Command:
    text: str
    where: str  # file:line, for the message of a failing test
    shown: list[str] = field(default_factory=list)  # lines of output

    @property
    def is_same_everywhere(self) -> bool:
        return self.text.startswith(("shardwise plan ", "shardwise launch "))

    def stale(self, output: str) -> str | None:
        """The first shown line that is not in the output, or not in its place. How long a search took is not
        compared."""
        said = iter([_plain(line) for line in output.splitlines()])
        return next((line for line in self.shown if _plain(line) not in said), None)

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
        elif language in SHELLS and found:
            found[-1].shown.append(line)
    assert language is None, f"{document} has a code block that is never closed"
    return found


def programs_of(document: Path) -> dict[str, str]:
    """Every Python program that a document tells its reader to save, by the name it says."""
    text = document.read_text(encoding="utf-8")
    return dict(re.findall(r"^Save this as `(\S+\.py)`:\n\n```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))


def _plain(line: str) -> str:
    return re.sub(r" in [\d.]+ s:", "", line.rstrip())


def shells_without_prompt(document: Path) -> list[str]:
    """Shell blocks in which no line starts with `$ `: their commands would never be executed, so there must be none."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in blocks if language in SHELLS and not re.search(r"^\$ ", body, re.MULTILINE)]


def _excerpt(output: str, shown: list[str]) -> list[str]:
    """The part of an output that begins and ends with lines of the same first words."""
    lines = [line.rstrip() for line in output.splitlines()]
    firsts = [line.split()[:1] for line in lines]
    begin = firsts.index(shown[0].split()[:1])
    end = len(firsts) - firsts[::-1].index(shown[-1].split()[:1])
    return lines[begin:end]


def renew(document: Path, home: Path) -> None:
    """Writes shown output anew where it is no longer printed. Files that a reader writes first are written."""
    text = document.read_text(encoding="utf-8")
    for command in commands_of(document):
        if command.text.startswith("cat >"):
            subprocess.run(["bash", "-c", command.text], cwd=home, check=True)
        if not command.is_same_everywhere:
            continue
        words = shlex.split(command.text, comments=True)[1:]
        done = subprocess.run([sys.executable, "-m", "shardwise", *words], cwd=home, capture_output=True, text=True)
        output = done.stdout + done.stderr
        assert done.returncode == command.expected_exit, f"{command.where}: ended with {done.returncode}\n{output}"
        if command.shown and command.stale(output):
            old, new = "\n".join(command.shown), "\n".join(_excerpt(output, command.shown))
            assert text.count(old) == 1, command.where
            text = text.replace(old, new)
            print(f"renewed  {command.where}: {command.text}")
    document.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    root = Path(__file__).parents[2]
    with tempfile.TemporaryDirectory() as home:
        for name in ("README.md", "docs/tutorial.md", "docs/planning.md", "docs/launch.md"):
            renew(root / name, Path(home))
