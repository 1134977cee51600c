"""Reads a batch script for sbatch as SLURM and bash read it: what is asked for, and the commands, with their lines."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from functools import cached_property

SHORT = {"N": "nodes", "n": "ntasks", "t": "time", "c": "cpus-per-task", "G": "gpus", "o": "output", "p": "partition"}
ASSIGNMENT = re.compile(r"""(?:^|[\s;(]|\bexport\s+)([A-Za-z_]\w*)=("[^"]*"|'[^']*'|\$\([^)]*\)|[^\s;&|)]*)""")


@dataclass(frozen=True)
class ShellLine:
    """A command with its continuations, and the number of its first line."""

    number: int
    text: str

    @cached_property
    def words(self) -> list[str]:
        try:
            return shlex.split(self.text, comments=True)
        except ValueError:  # quotes that end on a later line
            return self.text.split()

    def starts(self, *programs: str) -> bool:
        """Returns whether one of the programs is called here, in this line or inside of one that srun starts."""
        names = "|".join(map(re.escape, programs))
        return re.search(rf"(?:^|[\s;&|('\"/])(?:{names})(?=[\s'\"]|$)", self.text) is not None


class BatchScript:
    """A script for sbatch."""

    def __init__(self, text: str):
        self.asked: dict[str, tuple[str, int]] = {}
        self.late: list[tuple[str, int]] = []  # directives behind the first command, which sbatch does not read
        self.lines: list[ShellLine] = []
        pending, first = "", 0
        for number, line in enumerate(text.splitlines(), 1):
            stripped = line.strip()
            if not pending and line.startswith("#SBATCH"):
                self._read(line.removeprefix("#SBATCH"), number)
            elif pending or (stripped and not stripped.startswith("#")):
                first = first if pending else number
                pending += stripped.removesuffix("\\") + " "
                if not stripped.endswith("\\"):
                    self.lines.append(ShellLine(first, pending.strip()))
                    pending = ""
        if pending:
            self.lines.append(ShellLine(first, pending.strip()))

    def _read(self, directive: str, number: int) -> None:
        words = ShellLine(number, directive).words
        for at, word in enumerate(words):
            if not word.startswith("-") or word == "-":
                continue
            if word.startswith("--"):
                name, equals, value = word[2:].partition("=")
            else:
                name, equals, value = SHORT.get(word[1:2], word[1:2]), word[2:], word[2:]
            if not equals and at + 1 < len(words) and not words[at + 1].startswith("-"):
                value = words[at + 1]
            if self.lines:
                self.late.append((name, number))
            else:
                self.asked[name] = (value, number)

    def value(self, name: str) -> str | None:
        return self.asked[name][0] if name in self.asked else None

    def line_of(self, *names: str) -> int:
        """Returns the line of the first directive that is there, else that of the first one of all."""
        return next((self.asked[name][1] for name in names if name in self.asked), self.first_line)

    @property
    def first_line(self) -> int:
        return min((number for _, number in self.asked.values()), default=1)

    @property
    def nodes(self) -> int:
        match = re.match(r"\d+", self.value("nodes") or "")
        return int(match[0]) if match else 1

    @property
    def gpus_per_node(self) -> int | None:
        """The GPUs of a node that are asked for; None where nothing says it."""
        for name in ("gpus-per-node", "gres"):
            if match := re.search(r"(?:^|:)(\d+)(?:\(|,|$)", self.value(name) or ""):
                return int(match[1])
        tasks = re.match(r"\d+", self.value("ntasks-per-node") or "")
        if (match := re.search(r"(\d+)$", self.value("gpus-per-task") or "")) and tasks:
            return int(match[1]) * int(tasks[0])
        if match := re.search(r"(\d+)$", self.value("gpus") or ""):
            return -(-int(match[1]) // self.nodes)
        return None

    @property
    def memory_bytes(self) -> int | None:
        """The memory of a node that is asked for; None where nothing says it or all of it is taken."""
        cpus, gpus = re.match(r"\d+", self.value("cpus-per-task") or "1"), self.gpus_per_node or 1
        tasks = re.match(r"\d+", self.value("ntasks-per-node") or "1")
        per_cpu = int(cpus[0] if cpus else 1) * int(tasks[0] if tasks else 1)
        for name, times in (("mem", 1), ("mem-per-gpu", gpus), ("mem-per-cpu", per_cpu)):
            if match := re.fullmatch(r"(\d+)([KMGT]?)B?", self.value(name) or "", re.IGNORECASE):
                return int(match[1]) * times * 1024 ** (" KMGT".index(match[2].upper()) if match[2] else 2) or None
        return None

    @property
    def seconds(self) -> int | None:
        """The time that is asked for, of any of SLURM's spellings: `90`, `90:00`, `1:30:00`, `1-12`, `1-12:00:00`."""
        match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", self.value("time") or "")
        if match is None:
            return None
        days, first, second, third = match[1], int(match[2]), int(match[3] or 0), int(match[4] or 0)
        if days is not None:
            return ((int(days) * 24 + first) * 60 + second) * 60 + third
        return (first * 60 + second) * 60 + third if match[4] else first * 60 + second

    def assignments(self) -> list[tuple[int, str, str]]:
        """Returns (line, variable, value) of every assignment."""
        return [(line.number, name, value) for line in self.lines for name, value in ASSIGNMENT.findall(line.text)]

    def calling(self, *programs: str) -> list[ShellLine]:
        return [line for line in self.lines if line.starts(*programs)]
