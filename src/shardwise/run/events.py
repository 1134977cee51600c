"""Sampled events: what each rank did when, one file per rank, one step in N, so that the cost stays far below a step."""

from __future__ import annotations

import json
import time
from pathlib import Path

from shardwise.run.clock import Clock

_KIND = {
    "data_wait": "data",
    "compute": "compute",
    "comm_exposed": "collective",
    "bubble": "p2p",
    "optimizer": "optimizer",
}


class Events:
    def __init__(self, folder: Path, rank: int, every: int):
        self.rank, self.every = rank, every
        self.file = open(folder / f"rank{rank}.jsonl", "a", encoding="utf-8") if every else None  # noqa: SIM115

    def record(self, step: int, clock: Clock) -> None:
        """Write the spans of a finished step, if it is one of the sampled."""
        if self.file is None or step % self.every:
            return
        began = time.time() - (time.perf_counter() - clock.start)
        for span in clock.spans:
            line = {
                "t": began + span.start_s,
                "rank": self.rank,
                "kind": _KIND[span.kind],
                "name": span.name,
                "step": step,
                "start_us": round(span.start_s * 1e6),
                "dur_us": round(span.duration_s * 1e6),
            }
            if span.microbatch is not None:
                line["microbatch"] = span.microbatch
            if span.stage is not None:
                line["stage"] = span.stage
            if span.bytes is not None:
                line["bytes"] = span.bytes
            self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def record_experts(self, step: int, tokens: list[list[float]]) -> None:
        """Tokens of every expert, a line per routed layer; one rank says it for all."""
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

    def close(self) -> None:
        if self.file:
            self.file.close()
