"""`shardwise train` itself, from the command line to metrics.jsonl: loader, clock, events and all. Step times are the
distances between lines.

The run is ended once it has written the lines that are needed: nobody wants its checkpoint. It trains on text, so its
losses are not the others'.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpu.shapes import Case
from gpu.with_ours import SPEED, options_of

SECTIONS = {"optimizer": "optimizer.name", "attention": "model.attention"}


def words_of(case: Case, folder: Path, steps: int) -> list[str]:
    """The config of this case as words of the command line."""
    shape = case.shape
    model = {"rope_scaling": "none", "max_seq_len": shape.seq_len, **shape.changes}
    values: dict[str, Any] = {"model.preset": shape.model, **{f"model.{key}": value for key, value in model.items()}}
    values |= {"train.steps": steps, "train.global_batch": case.micro_batch, "train.micro_batch": case.micro_batch}
    values |= {"train.seq_len": shape.seq_len, "data.tokenizer": "bytes", "run.dir": folder, "run.name": "measured"}
    values |= {"memory.precision": "bf16" if case.is_bf16 else "fp32", "checkpoint.every": 10**6}
    for key, value in options_of(case).items():
        if key != "micro_batch":
            values[f"speed.{key}" if key in SPEED else SECTIONS.get(key, f"memory.{key}")] = value
    for key, value in (shape.adapter or {}).items():
        values[f"adapter.{key}"] = json.dumps(value) if isinstance(value, tuple) else value
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]


class TrainRun:
    """Answers like any worker; everything is measured when it is built. The first `warm_up` steps do not count."""

    def __init__(self, case: Case, steps: int, rounds: int, warm_up: int, limit: float):
        self.case, self.steps, self.asked = case, steps, 0
        began, needed = time.perf_counter(), warm_up + steps * rounds + 1
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "shardwise", "train", "--no-verify", "--nproc", "1"]
            with (Path(folder) / "log").open("w") as log:
                run = subprocess.Popen(
                    [*command, *words_of(case, Path(folder), needed + 2)],
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
                try:
                    lines = self.wait_for(run, Path(folder) / "measured/metrics.jsonl", needed, began + limit)
                except RuntimeError as error:
                    raise RuntimeError(f"{error}: {(Path(folder) / 'log').read_text()[-1500:]}") from None
                finally:
                    if run.poll() is None:
                        os.killpg(run.pid, signal.SIGKILL)
                    run.wait()
        self.built_s = time.perf_counter() - began
        times = [second["wall_time"] - first["wall_time"] for first, second in pairwise(lines)]
        self.times, self.lines = times[warm_up:], lines

    @staticmethod
    def wait_for(run: subprocess.Popen[Any], path: Path, needed: int, deadline: float) -> list[dict[str, Any]]:
        while True:
            over = run.poll() is not None
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            steps = [line for line in found if "event" not in line and "step_s" in line]
            if len(steps) >= needed:
                return steps[:needed]
            if over or time.perf_counter() > deadline:
                raise RuntimeError(f"`shardwise train` wrote {len(steps)} of {needed} steps")
            time.sleep(0.2)

    def round(self) -> dict[str, Any]:
        first = self.asked * self.steps
        self.asked += 1
        return {"step_s": self.times[first : first + self.steps], "losses": []}

    def profile(self) -> dict[str, Any]:
        return {"profile": None}

    def about(self) -> dict[str, Any]:
        peak = self.lines[-1]["peak_memory_bytes"] if self.case.device == "cuda" else None
        own = {key: value for key, value in self.lines[-1].items() if key.endswith("_s") and key != "tokens_per_s"}
        return {
            "parameters": self.case.shape.spec.num_parameters,
            "notes": {"last step, seconds by part": own},
            "losses": [line["loss"] for line in self.lines[:2]],
            "tokens": self.case.tokens,
            "compiled_graphs": 0,
            "graph_breaks": 0,
            "peak_bytes": peak,
            "reserved_bytes": peak or 0,
            "free_bytes": 0,  # it has left; nobody is to start beside it
        }
