"""Writes sampled events: what each rank did when, one file per rank, one step in N, so that the cost stays far below a
step.

One line per span of the clock: pipeline actions, collectives (inside them), sends and receives between stages, the
optimizer, waiting for data. `dur_us` of a collective is what the rank waited for it; what travelled behind computing
has a short one or none.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.run.clock import Clock, Lap, Span

_KIND = {
    "data_wait": "data",
    "compute": "compute",
    "comm_exposed": "collective",
    "bubble": "p2p",
    "optimizer": "optimizer",
    "other": "p2p",  # a send: nobody waits for it
}


class Events:
    """The event file of one rank."""

    def __init__(self, folder: Path, rank: int, every: int, stages: Sequence[int] = (0,)):
        """`stages` are the pipeline stages that this rank has."""
        self.rank, self.every = rank, every
        self.chunk_of = {stage: chunk for chunk, stage in enumerate(stages)} if len(stages) > 1 else {}
        self.file = open(folder / f"rank{rank}.jsonl", "a", encoding="utf-8") if every else None  # noqa: SIM115

    def record(self, step: int, clock: Clock | Lap) -> None:
        """Writes the spans of a finished step, if it is one of the sampled."""
        if self.file is None or step % self.every:
            return
        began = time.time() - (time.perf_counter() - clock.start)
        lines = [json.dumps(self._line(step, began, span)) + "\n" for span in clock.spans]
        self.file.write("".join(lines))
        self.file.flush()

    def record_experts(self, step: int, tokens: list[list[float]]) -> None:
        """Writes the tokens of every expert, a line per routed layer; one rank writes them for all."""
        if self.file is None or step % self.every:
            return
        for layer, counts in enumerate(tokens):
            line = {
                "t": time.time(),
                "rank": self.rank,
                "kind": "experts",
                "name": f"routed layer {layer}",
                "step": step,
            }
            self.file.write(json.dumps(line | {"start_us": 0, "dur_us": 0, "tokens": [int(n) for n in counts]}) + "\n")
        self.file.flush()

    def record_memory(self, step: int, curve: Sequence[Any], began_s: float) -> None:
        """Writes the memory of a watched step, a line per moment (memory/account.py). `began_s` is the step's start by
        the clock of these moments."""
        if self.file is None:
            return
        offset = time.time() - time.perf_counter()
        for point in curve:
            span = point.during
            line = {
                "t": offset + point.at,
                "rank": self.rank,
                "kind": "memory",
                "name": span.name if span else "step",
                "step": step,
                "microbatch": span.microbatch if span else None,
                "stage": span.stage if span else None,
                "bytes": point.total,
                "start_us": round((point.at - began_s) * 1e6),
                "dur_us": 0,
                "held": point.by_category(),
            }
            self.file.write(json.dumps({key: value for key, value in line.items() if value is not None}) + "\n")
        self.file.flush()

    def _line(self, step: int, began: float, span: Span) -> dict[str, object]:
        line = {
            "t": began + span.start_s,
            "rank": self.rank,
            "kind": _KIND[span.kind],
            "name": span.name,
            "step": step,
            "microbatch": span.microbatch,
            "stage": span.stage,
            "chunk": None if span.stage is None else self.chunk_of.get(span.stage),
            "group": span.group,
            "bytes": span.num_bytes,
            "start_us": round(span.start_s * 1e6),
            "dur_us": round(span.duration_s * 1e6),
        }
        return {key: value for key, value in line.items() if value is not None}

    def close(self) -> None:
        if self.file:
            self.file.close()
