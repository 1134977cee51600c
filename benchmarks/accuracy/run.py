"""`Run`: one published row, whichever of the two headers it came under. Owns what its words mean; nothing here knows
the planner."""

from __future__ import annotations

import csv
import math
import re
from dataclasses import dataclass
from pathlib import Path

NAMES = {
    "gpu": "gpu_kind",
    "n_gpus": "gpus",
    "gbs": "global_batch",
    "mbs": "micro_batch",
    "shard": "zero",
    "mem_gb": "peak_mem_gb",
    "tok_s_gpu": "tokens_per_s_per_gpu",
    "tflops_gpu": "tflops_per_gpu",
    "notes": "note",
}
"""The second header's names for the first one's columns."""

NEEDED = {"model", "gpus", "gpu_kind", "tp", "pp"}
GIB = 2**30


class Skip(Exception):
    """A row that cannot be used, with the reason."""


@dataclass(frozen=True)
class Run:
    file: str
    line: int
    cells: dict[str, str]

    def text(self, name: str) -> str:
        return self.cells.get(name, "").strip()

    def number(self, name: str) -> float | None:
        try:
            value = float(self.text(name))
        except ValueError:
            return None
        return value if math.isfinite(value) else None

    def count(self, name: str, default: int | None = None) -> int:
        value = self.number(name)
        if value is None:
            if default is None:
                raise Skip(f"no {name}")
            return default
        return int(value)

    @property
    def note(self) -> str:
        return self.text("note")

    def found(self, pattern: str) -> int | None:
        """The first number that a pattern finds in the note."""
        match = re.search(pattern, self.note, re.IGNORECASE)
        return int(match[1]) if match else None

    @property
    def has_failed(self) -> bool:
        if self.text("status").lower().startswith(("fail", "oom", "crash")):
            return True
        return self.step_s is None and re.search(r"\bOOM\b|out of memory", self.note) is not None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step: as published, or what the published tokens per second come to."""
        if seconds := self.number("step_time_s"):
            return seconds
        rate, batch, seq = (self.number(name) for name in ("tokens_per_s_per_gpu", "global_batch", "seq"))
        return batch * seq / (rate * self.count("gpus")) if rate and batch and seq else None

    @property
    def pace(self) -> float | None:
        """For ranking alone, the smaller the faster. FLOP/s count differently from source to source, but not among runs
        of one model."""
        tflops = self.number("tflops_per_gpu")
        return self.step_s or (1 / tflops if tflops else None)

    @property
    def memory_bytes(self) -> float | None:
        """Frameworks and nvidia-smi count in 2^30 and call it GB; a source that says otherwise would have to be named
        here."""
        size = self.number("peak_mem_gb")
        return size * GIB if size else None

    @property
    def nodes(self) -> int | None:
        if (nodes := self.number("nodes")) is not None:
            return int(nodes)
        per_node = self.number("gpus_per_node")
        return -(-self.count("gpus") // int(per_node)) if per_node else None

    @property
    def nic(self) -> float | None:
        """Bytes per second, GPU and direction, where the note states the network."""
        gigabits = re.search(r"([\d.]+)\s*Gb(?:/s|ps)? per GPU", self.note, re.IGNORECASE)
        if gigabits:
            return float(gigabits[1]) * 1e9 / 8
        per_node = re.search(r"(\d+)\s*[x×]\s*(\d+)\s*Gb", self.note) or re.search(
            r"(\d+) \w+ HCAs per node \((\d+) Gb", self.note
        )
        whole = re.search(r"([\d.]+) Gb(?:/s|ps) (?:per node|node-node)", self.note)
        total = int(per_node[1]) * int(per_node[2]) if per_node else float(whole[1]) if whole else None
        if total is None or not self.nodes:
            return None
        return total * 1e9 / 8 / -(-self.count("gpus") // self.nodes)


def read_runs(path: Path) -> list[Run] | None:
    """None: the file has other columns."""
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        reader = csv.DictReader(file)
        names = [NAMES.get(name.strip(), name.strip()) for name in reader.fieldnames or ()]
        if not set(names) >= NEEDED:
            return None
        reader.fieldnames = names
        return [
            Run(path.name, reader.line_num, {k: v or "" for k, v in row.items() if isinstance(k, str)})
            for row in reader
        ]
