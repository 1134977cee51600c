"""Tokens per second on one GPU: ours and what people would use instead, same shapes, same tokens, in one run.

    python benchmarks/gpu/throughput.py WORDS

    --json FILE [--shapes 1.5b ...] [--only ours plain ...] [--minutes 9]   measures what FILE lacks
    --json FILE --rows 1.5b/ours 8b-wide/ours:micro_batch=16 ...            measures these, in this order
    --json FILE --show [--page]                                             needs no GPU
    --smoke                                                                 tiny shapes on a CPU, in fp32
    --rehearse [--only 'ours:fuse=true' ...]                                the same, traced and in bf16
    --golden [STEPS] --json FILE                                            no setting moves the loss: gpu/golden.py

Every contender is a process of its own (gpu/worker.py) with its own compile cache. As many as fit into the card's
memory live side by side and take turns, a round of steps each; the others wait. A row is written after every round, so
that whoever is stopped loses nothing but the round. A time limit holds for each contender, and one for all. `--only
'ours:recompute=full,micro_batch=4'` tries anything (gpu/shapes.py). Whoever fails leaves a row that says why.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.shapes import CONTENDERS, SHAPES, SMOKE, case_of, small

from shardwise.files import write_atomically

CLOCKS = (
    "name",
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.draw",
    "power.limit",
    "temperature.gpu",
)
PREDICTED_FOR = "h200"
RESERVED_S = 25.0  # of --minutes, for the rounds of whoever starts last


class Failed(Exception):
    def __init__(self, kind: str, why: str, trace: str = ""):
        super().__init__(why)
        self.kind, self.why, self.trace = kind, why, trace


class Process:
    """A worker, and what it answers."""

    def __init__(self, shape: str, contender: str, asked: argparse.Namespace, folder: Path, limit: float):
        self.shape, self.contender, self.limit = shape, contender, limit
        self.rounds: list[dict[str, Any]] = []
        self.failed = False
        self.clocks: dict[str, str] | None = None
        question = {"shape": shape, "contender": contender, "steps": asked.steps, "warm_up": asked.warm_up}
        question |= {"rounds": asked.rounds, "limit": limit, "rehearses": asked.rehearse}
        question["device"] = "cpu" if shape in SMOKE else "cuda"
        cache = folder / f"{shape}-{contender}".replace("/", "_").replace(":", "_")
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(cache),
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        }
        if shape in SMOKE:  # some machines announce AMX and forbid it
            environment.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "worker.py"), json.dumps(question)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
        )  # fmt: skip
        self.answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self.said: list[str] = []
        threading.Thread(target=self.listen, daemon=True).start()

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(json.loads(line[1:])) if line.startswith("@") else self.said.append(line)
        self.answers.put(
            {"event": "failed", "kind": "error", "why": "it ended without a word", "trace": "".join(self.said[-30:])}
        )

    def answer(self) -> dict[str, Any]:
        try:
            found = self.answers.get(timeout=self.limit)
        except queue.Empty:
            self.kill()
            raise Failed("time", f"no answer within {self.limit:.0f} s") from None
        if found["event"] == "failed":
            self.kill()
            raise Failed(found["kind"], found["why"], found.get("trace", ""))
        return found

    def ask(self, word: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        if word == "round" and self.shape not in SMOKE:
            self.clocks = clocks()  # while it computes
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def clocks() -> dict[str, str] | None:
    command = ["nvidia-smi", f"--query-gpu={','.join(CLOCKS)}", "--format=csv,noheader"]
    try:
        line = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.splitlines()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None
    return dict(zip(CLOCKS, (value.strip() for value in line.split(",")), strict=True))


class Measuring:
    """Goes through a list of (shape, contender), some of them side by side, and writes each row as soon as it is
    there."""

    def __init__(self, asked: argparse.Namespace, found: dict[str, Any]):
        self.asked, self.found, self.alive = asked, found, []  # type: ignore[var-annotated]
        self.deadline = time.monotonic() + 60 * asked.minutes

    def go(self, wanted: list[tuple[str, str]]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.folder = Path(folder)
            try:
                for shape, contender in wanted:
                    if self.alive and not self.has_room(shape, contender):
                        self.finish()
                    if self.left_s() < RESERVED_S:
                        print(f"{shape} {contender}: no time left; the same command goes on from here")
                        continue
                    self.start(shape, contender)
                self.finish()
            finally:
                for process, _ in self.alive:
                    process.kill()

    def left_s(self) -> float:
        """For starting somebody."""
        return self.deadline - time.monotonic() - RESERVED_S

    def has_room(self, shape: str, contender: str) -> bool:
        """Beside the living of the same shape, for one that takes as much as the largest. A whole run plans with all
        memory."""
        if case_of(shape, contender).base == "train":
            return False
        if len(self.alive) >= self.asked.alive or any(process.shape != shape for process, _ in self.alive):
            return False
        if shape in SMOKE:
            return True
        largest = max(ready["reserved_bytes"] for _, ready in self.alive)
        return 1.1 * largest < self.alive[-1][1]["free_bytes"]

    def start(self, shape: str, contender: str) -> None:
        process = Process(shape, contender, self.asked, self.folder, min(self.asked.limit, self.left_s()))
        try:
            ready = process.answer()
            if self.alive and ready.get("alloc_retries"):  # it got by, but not as it would have alone
                process.kill()
                raise Failed("memory", "others were in the way")
        except Failed as failure:
            if failure.kind == "memory" and self.alive:
                self.finish()
                self.start(shape, contender)
                return
            self.fail(shape, contender, failure)
            return
        self.alive.append((process, ready))

    def finish(self) -> None:
        """Rounds of the living in turn, then a profile of each."""
        for number in range(self.asked.rounds):
            for process, ready in self.alive:
                self.attempt(process, lambda p: p.rounds.append(p.ask("round")))
                if not process.failed:
                    row = row_of(process, ready, len(self.alive))
                    self.keep(process.shape, process.contender, row, aloud=number == self.asked.rounds - 1)
        for process, _ready in self.alive:
            if not process.failed and (self.asked.profile is None or process.contender in self.asked.profile):
                self.add_profile(process)
            process.kill()
        self.alive = []

    def add_profile(self, process: Process) -> None:
        """Without it the times are still worth something."""
        row = self.found["rows"][f"{process.shape}/{process.contender}"]
        try:
            row["profile"] = process.ask("profile")["profile"]
            save(self.asked, self.found)
        except (Failed, BrokenPipeError) as trouble:
            print(f"{process.shape} {process.contender}: no profile: {trouble}", flush=True)

    def attempt(self, process: Process, action: Any) -> Any:
        """Nothing, if it failed now or before."""
        if process.failed:
            return None
        try:
            return action(process)
        except (Failed, BrokenPipeError) as trouble:
            process.failed = True
            failure = (
                trouble if isinstance(trouble, Failed) else Failed("error", "it went away", "".join(process.said[-30:]))
            )
            self.fail(process.shape, process.contender, failure)
            return None

    def fail(self, shape: str, contender: str, failure: Failed) -> None:
        """Where it happened is for whoever watches, not for the file: it names this machine's folders."""
        print(failure.trace, file=sys.stderr)
        self.keep(shape, contender, {"error": failure.why, "kind": failure.kind})

    def keep(self, shape: str, contender: str, row: dict[str, Any], aloud: bool = True) -> None:
        self.found["rows"][f"{shape}/{contender}"] = {"shape": shape, "contender": contender, **row}
        peak = f", {row['peak_bytes'] / 2**30:.1f} GiB" if row.get("peak_bytes") else ""
        reported = row.get("error") or f"{row['tokens_per_s']:.0f} tok/s, {1e3 * row['median_s']:.1f} ms{peak}"
        if aloud:
            print(f"{shape} {contender}: {reported}", flush=True)
        save(self.asked, self.found)


def row_of(process: Process, ready: dict[str, Any], beside: int) -> dict[str, Any]:
    case, last = case_of(process.shape, process.contender), process.rounds[-1]
    seconds = [value for one in process.rounds for value in one["step_s"]]
    median = statistics.median(seconds)
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [median] * 3
    row = {
        "date": time.strftime("%Y-%m-%d"),
        "tokens": case.tokens,
        "flops_per_token": case.shape.flops_per_token,
        "frozen_flops_per_token": case.shape.frozen_flops_per_token if case.shape.adapter else None,
        "median_s": median,
        "quartiles_s": [quartiles[0], quartiles[2]],
        "round_medians_s": [statistics.median(one["step_s"]) for one in process.rounds],
        "tokens_per_s": case.tokens / median,
        "losses": [*ready["losses"], *(loss for one in process.rounds for loss in one["losses"])],
        "peak_bytes": last.get("peak_bytes"),
        "built_s": ready["built_s"],
        "start_s": ready["start_s"],
        "recompiled": last["compiled_graphs"] - ready["compiled_graphs"],
        "measured_beside": beside - 1,
        "clocks": process.clocks,
        "profile": None,
        **{
            key: last.get(key)
            for key in ("parameters", "notes", "compiled_graphs", "graph_breaks", "alloc_retries", "versions", "device")
        },
    }
    if case.base in ("ours", "train"):
        from gpu.with_ours import predicted, run_with

        try:
            row["predicted"] = (
                predicted(run_with(case, row["notes"] or {}), PREDICTED_FOR) if case.device == "cuda" else None
            )
        except Exception as error:  # what was measured is worth more
            print(f"{process.shape} {process.contender}: no prediction: {error}", flush=True)
            row["predicted"] = None
    return row


def ceiling(asked: argparse.Namespace) -> dict[str, float]:
    """TFLOP/s of square matmuls; whoever has no GPU ends here."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return Process("1.5b", "ceiling", asked, Path(folder), asked.limit).answer()["matmul_tflops"]
        except Failed as failure:
            raise SystemExit(
                f"error: nothing can be measured here\n  why  {failure.why}\n  fix  --smoke runs tiny shapes on a CPU, "
                "--show shows a result file"
            ) from None


def save(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    if asked.json:
        asked.json.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(asked.json, json.dumps(found, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="results so far; rows that it has are not measured again")
    parser.add_argument("--shapes", nargs="+", metavar="SHAPE", choices=[*SHAPES, *SMOKE], help=", ".join(SHAPES))
    parser.add_argument("--only", nargs="+", metavar="CONTENDER")
    parser.add_argument(
        "--again", action="store_true", help="measure rows that are there already; failed ones always are"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="of a round")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument(
        "--limit", type=float, default=240, help="seconds a contender may take to answer, its start included"
    )
    parser.add_argument("--minutes", type=float, default=60, help="start nothing new after that")
    parser.add_argument("--alive", type=int, default=3, help="contenders side by side at most; 1: one after the other")
    parser.add_argument("--rows", nargs="+", metavar="SHAPE/CONTENDER", help="these and no others, in this order")
    parser.add_argument(
        "--profile", nargs="*", metavar="CONTENDER", help="who is profiled, if not all; nothing: nobody"
    )
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="the smoke, traced by the compiler and in bf16, as on a GPU; --rows with small models",
    )
    parser.add_argument("--golden", nargs="?", type=int, const=200, metavar="STEPS", help="of each run; default 200")
    parser.add_argument("--show", action="store_true", help="measure nothing")
    parser.add_argument("--page", action="store_true", help="write benchmarks/results/speed_h200.md and its plot anew")
    asked = parser.parse_args()
    asked.smoke |= asked.rehearse
    if asked.golden:
        from gpu.golden import golden

        sys.exit(not golden(asked.json, steps=asked.golden, smoke=asked.smoke, only=asked.only))
    found: dict[str, Any] = {"rows": {}}
    if asked.json and asked.json.exists():
        found = json.loads(asked.json.read_text(encoding="utf-8"))
    if not asked.show:
        names = asked.shapes or list(SMOKE if asked.smoke else SHAPES)
        wanted = [(shape, name) for shape in names for name in asked.only or CONTENDERS[shape]]
        if asked.rows:
            wanted = [(shape, name) for shape, _, name in (row.partition("/") for row in asked.rows)]
            wanted = [(small(shape), name) for shape, name in wanted] if asked.rehearse else wanted
            for shape, name in wanted:
                case_of(shape, name)  # a wrong name is refused before anything runs
        if not asked.smoke and "ceiling" not in found:
            found["ceiling"], found["machine"] = ceiling(asked), clocks()
            save(asked, found)
        there = {key for key, row in found["rows"].items() if "error" not in row and not asked.again}
        Measuring(asked, found).go([one for one in wanted if "/".join(one) not in there])
    from gpu.speed_page import GOLDEN, PAGE, PLOT, page, plot, table

    print(table(found))
    if asked.page:
        golden_found = json.loads(GOLDEN.read_text(encoding="utf-8")) if GOLDEN.exists() else {}
        PAGE.write_text(page(found, golden_found), encoding="utf-8")
        (PAGE.parent / PLOT).write_text(plot(found), encoding="utf-8")


if __name__ == "__main__":
    main()
