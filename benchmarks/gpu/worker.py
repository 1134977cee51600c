"""One contender in a process of its own: builds, warms up, then does what each line of its input says.

    round       a few steps; answers with the time of each, and what it holds by now
    profile     a few steps under torch's profiler; answers with the time by part

Answers are lines that begin with @ and go on in JSON; everything else it prints is a library talking. Steps follow each
other without a wait: their times are the distances between events on the device. Peak memory is that of the steps after
the warm-up.
"""

from __future__ import annotations

import json
import platform
import signal
import statistics
import sys
import tempfile
import time
import traceback
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path += [str(place) for place in sorted((Path(__file__).parents[2] / "build/peers").glob("*"))]
"""Peers that are unpacked there, after those that are installed."""


def say(**what: Any) -> None:
    print("@" + json.dumps(what), flush=True)


def main() -> None:
    asked = json.loads(sys.argv[1])
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that whatever it has started ends with it
    try:
        check_device(asked["device"])
        if asked["contender"] == "ceiling":
            say(event="ready", **ceiling(asked["device"]))
            return
        worker = Worker(asked) if base_of(asked["contender"]) != "train" else train_run(asked)
        say(event="ready", built_s=worker.built_s, start_s=time.perf_counter() - began, **worker.about())
        for line in sys.stdin:
            word = line.strip()
            done = worker.round() if word == "round" else worker.profile()
            say(event=word, **{**worker.about(), **done})
    except Exception as error:
        say(event="failed", kind=kind_of(error), why=why(error), trace=traceback.format_exc()[-3000:])


def check_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("this machine has no CUDA device that its torch can use")


def base_of(contender: str) -> str:
    from gpu.shapes import VARIANTS

    return VARIANTS.get(contender, contender).partition(":")[0]


def train_run(asked: dict[str, Any]) -> Any:
    from gpu.shapes import case_of
    from gpu.with_train import TrainRun

    case = case_of(asked["shape"], asked["contender"], rehearses=asked["rehearses"])
    return TrainRun(case, asked["steps"], asked["rounds"], asked["warm_up"], 0.9 * asked["limit"])


def why(error: Exception) -> str:
    """Its first lines: those of the compiler say only in the second what happened."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return " ".join(lines[:3])[:400]


def kind_of(error: Exception) -> str:
    import torch

    if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
        return "memory"
    return "missing" if isinstance(error, ImportError) else "error"


class Worker:
    def __init__(self, asked: dict[str, Any]):
        import torch
        from gpu.contender import batches, build
        from gpu.shapes import case_of

        torch.manual_seed(0)
        if asked["rehearses"]:  # graphs with plain kernels: seconds instead of minutes
            torch.compile = partial(torch.compile, backend="aot_eager")  # type: ignore[assignment]
        torch.backends.cuda.matmul.allow_tf32 = True
        self.case = case_of(asked["shape"], asked["contender"], rehearses=asked["rehearses"])
        self.on_cuda, self.steps = self.case.device == "cuda", asked["steps"]
        began = time.perf_counter()
        self.contender = build(self.case)
        self.batches, self.done = batches(self.case), 0
        self.built_s = time.perf_counter() - began
        self.losses = [float(loss) for loss in self.run(2)]
        self.reset_peak()
        self.run(max(0, asked["warm_up"] - 2))
        self.synchronize()

    def run(self, count: int) -> list[Any]:
        losses = []
        for _ in range(count):
            losses.append(self.contender.step(*self.batches[self.done % len(self.batches)]))
            self.done += 1
        return losses

    def round(self) -> dict[str, Any]:
        """Steps without a wait between them."""
        marks, losses = [self.mark()], []
        for _ in range(self.steps):
            losses += self.run(1)
            marks.append(self.mark())
        self.synchronize()
        if self.on_cuda:
            seconds = [first.elapsed_time(last) / 1e3 for first, last in pairwise(marks)]
        else:
            seconds = [last - first for first, last in pairwise(marks)]
        self.step_s = statistics.median(seconds)
        return {"step_s": seconds, "losses": [float(loss) for loss in losses]}

    def mark(self) -> Any:
        if not self.on_cuda:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def profile(self) -> dict[str, Any]:
        """Without it the times are still worth something."""
        try:
            return {"profile": self.traced(*((3, 1) if self.step_s < 2 else (1, 0))) if self.on_cuda else None}
        except Exception as error:
            return {"profile": None, "why": why(error)}

    def traced(self, steps: int, before: int) -> dict[str, Any]:
        import torch
        from gpu.parts import STEP, profile_of
        from torch.profiler import ProfilerActivity, record_function

        self.synchronize()
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            for _ in range(before + steps):
                with record_function(STEP):
                    self.run(1)
            self.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            found.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        return profile_of(trace, steps, before)

    def synchronize(self) -> None:
        if self.on_cuda:
            import torch

            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        if self.on_cuda:
            import torch

            torch.cuda.reset_peak_memory_stats()

    def about(self) -> dict[str, Any]:
        import torch
        from torch._dynamo.utils import counters

        found: dict[str, Any] = {
            "parameters": self.contender.parameters,
            "notes": self.contender.notes,
            "losses": self.losses,
            "tokens": self.case.tokens,
            "compiled_graphs": counters["stats"]["unique_graphs"],
            "graph_breaks": sum(counters["graph_break"].values()),
            "versions": {"torch": torch.__version__, "python": platform.python_version()},
        }
        if self.on_cuda:
            stats = torch.cuda.memory_stats()
            found |= {
                "device": torch.cuda.get_device_name(0),
                "peak_bytes": torch.cuda.max_memory_allocated(),
                "reserved_bytes": torch.cuda.max_memory_reserved(),
                "free_bytes": torch.cuda.mem_get_info()[0],
                "alloc_retries": stats.get("num_alloc_retries", 0),
            }
        return found


def ceiling(device: str) -> dict[str, Any]:
    """What matmuls alone reach here: the largest of a few square ones, bf16."""
    import torch

    sizes, kind = ((4096, 8192, 16384), torch.bfloat16) if device == "cuda" else ((256,), torch.float32)
    found = {}
    for size in sizes:
        a, b = (torch.randn(size, size, device=device, dtype=kind) for _ in range(2))
        times = []
        for _ in range(12):
            if device == "cuda":
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                a @ b
                end.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(end) / 1e3)
            else:
                began = time.perf_counter()
                a @ b
                times.append(time.perf_counter() - began)
        found[str(size)] = 2 * size**3 / sorted(times)[len(times) // 2] / 1e12
    return {"matmul_tflops": found}


if __name__ == "__main__":
    main()
