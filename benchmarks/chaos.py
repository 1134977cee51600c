"""How much of its time a run loses to random faults, and whether it ends with the weights of an undisturbed one.

    python benchmarks/chaos.py [--steps 6000] [--nproc 2] [--gap 20] [--seed 0] [--out results/chaos.json]

The same small run is trained twice: once in peace, once with a fault every `--gap` seconds on average. A fault kills a
random rank (SIGKILL, SIGSEGV), stops one (SIGSTOP), flips a bit in the newest checkpoint or cuts a file of it short
and then kills a rank, asks the launcher to end (SIGTERM), or kills the launcher. After the last two this program does
what a scheduler does: it types `shardwise resume`. Nothing else is done for the run. Goodput is the undisturbed run's
time from its first step to its last over that of the disturbed run, everything in between counted: finding the fault,
starting again, making steps again. The end is compared byte by byte, and what is left over (processes, scratch
directories) is counted. The seconds are this machine's: look at its load before you believe them.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.checkpoint.listing import committed
from shardwise.run.rundir import RunDir

RESULTS = Path(__file__).resolve().parent / "results" / "chaos.json"
STORIES = Path(__file__).resolve().parents[1] / "tests" / "golden" / "stories.jsonl"
SMALL = [
    "model.num_layers=2",
    "model.hidden=32",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.ffn=64",
    f"data.source={STORIES}",
    "train.seq_len=32",
    "train.global_batch=8",
    "train.eval_every=0",
    "train.sample_every=0",
    "train.sample_tokens=8",
    "run.events_every=0",
    "run.max_restarts=1000000",
]
KINDS = (
    "kill a rank",
    "crash a rank",
    "stop a rank",
    "flip a bit",
    "cut a file",
    "end the launcher",
    "kill the launcher",
)
PATIENCE_S = 120.0


class Trial:
    """One run that is started, watched and hurt."""

    def __init__(self, folder: Path, name: str, words: list[str]):
        self.folder, self.run, self.words = folder, RunDir(folder / "runs" / name), words
        self.output = open(folder / f"{name}.txt", "w")  # noqa: SIM115
        self.process = self._start("train", *words, f"run.name={name}")
        self.starts, self.lines_before = 1, 0

    def _start(self, *words: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "shardwise", *map(str, words)]
        return subprocess.Popen(
            command, cwd=self.folder, stdout=self.output, stderr=self.output, start_new_session=True
        )

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines of steps that were written so far, also those that were made again."""
        return [line for line in self.run.lines() if "event" not in line and "loss" in line]

    def ranks(self) -> list[int]:
        """Return the processes of the ranks that live, in the order of their start."""
        with suppress(OSError):
            tasks = Path(f"/proc/{self.process.pid}/task").iterdir()
            return sorted(int(pid) for task in tasks for pid in (task / "children").read_text().split())
        return []

    def go_on(self) -> bool:
        """Return whether the run has ended for good; start it again where a scheduler would."""
        if (code := self.process.poll()) is None:
            return False
        if code == 0:
            return True
        if code not in (75, 5, -signal.SIGKILL):
            raise SystemExit(f"chaos.py: the run ended with {code}; see {self.output.name}")
        while self.run.is_locked():  # ranks whose launcher was killed commit and end
            time.sleep(0.1)
        self.lines_before = len(self.lines())
        self.process, self.starts = self._start("resume", self.run.path), self.starts + 1
        return False

    def hurt(self, kind: str, draw: random.Random) -> bool:
        """Do something to the run; return whether it could be done."""
        if kind == "end the launcher":
            self.process.send_signal(signal.SIGTERM)
            return True
        if kind == "kill the launcher":
            self.process.kill()
            return True
        if not (ranks := self.ranks()):
            return False
        if kind in ("flip a bit", "cut a file"):
            newest = committed(self.run.checkpoints)
            if len(newest) < 2:  # the one before must be there to go on from
                return False
            damage(newest[0], kind, draw)
        number = {"stop a rank": signal.SIGSTOP, "crash a rank": signal.SIGSEGV}.get(kind, signal.SIGKILL)
        os.kill(draw.choice(ranks), number)
        return True


def damage(checkpoint: Path, kind: str, draw: random.Random) -> None:
    """Damage one file of a checkpoint."""
    with suppress(FileNotFoundError):  # a newer one was committed just now, and this one removed
        file = draw.choice(sorted(checkpoint.glob("*.safetensors")))
        size = file.stat().st_size
        with open(file, "r+b") as content:
            if kind == "cut a file":
                content.truncate(size // 2)
                return
            content.seek(place := draw.randrange(size))
            byte = content.read(1)[0] ^ (1 << draw.randrange(8))
            content.seek(place)
            content.write(bytes([byte]))


def undisturbed(folder: Path, words: list[str]) -> tuple[RunDir, float]:
    """Return the run in peace, and the seconds from its first step to its last."""
    trial = Trial(folder, "straight", words)
    if trial.process.wait():
        raise SystemExit(f"chaos.py: the undisturbed run failed; see {trial.output.name}")
    return trial.run, span_s(trial.lines())


def span_s(lines: list[dict[str, Any]]) -> float:
    """Return the seconds from the beginning of the first step to the end of the last."""
    return float(lines[-1]["wall_time"] - lines[0]["wall_time"] + lines[0]["step_s"])


def disturbed(folder: Path, words: list[str], gap_s: float, seed: int) -> tuple[Trial, list[dict[str, Any]]]:
    """Return the run with faults, and of each fault its kind and the seconds to the next step's line."""
    draw, trial = random.Random(seed), Trial(folder, "hurt", words)
    faults: list[dict[str, Any]] = []
    due = time.monotonic() + PATIENCE_S
    seen, recovering, began, starts = 0, False, time.monotonic(), 1
    while not trial.go_on():
        time.sleep(0.05)
        lines, now = len(trial.lines()), time.monotonic()
        if not seen and lines:
            due = now + draw.expovariate(1 / gap_s)
        if recovering and trial.starts >= starts and lines > max(seen, trial.lines_before):
            faults[-1]["recovery_s"] = now - began
            recovering, due = False, now + draw.expovariate(1 / gap_s)
        if recovering and now - began > PATIENCE_S:
            raise SystemExit(
                f"chaos.py: no step {PATIENCE_S:.0f} s after: {faults[-1]['kind']}; see {trial.output.name}"
            )
        seen = lines if not recovering else seen
        if not recovering and now >= due and trial.process.poll() is None:
            if trial.hurt(kind := draw.choice(KINDS), draw):
                faults.append({"kind": kind, "step": max(trial.run.steps(), default=0)})
                time.sleep(0.3)  # what was on its way when it came
                seen, recovering, began = len(trial.lines()), True, now
                starts = trial.starts + kind.endswith("launcher")
            else:
                due = now + 1.0
    return trial, [fault for fault in faults if "recovery_s" in fault]


def contents(run: RunDir) -> dict[str, str]:
    """Return the digests of the tensors' files of the newest checkpoint."""
    newest = committed(run.checkpoints)[0]
    found = {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in newest.glob("*.safetensors")}
    return {"step": newest.name, **found}


def left_over(run: RunDir) -> dict[str, int]:
    """Return how many processes and scratch directories of a run are left."""
    processes = 0
    for link in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            processes += link.readlink() == run.path.parents[1]
    return {"processes": processes, "scratch": sum(1 for _ in run.checkpoints.glob(".*"))}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--gap", type=float, default=20.0, help="seconds between two faults, on average")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    words = ["--nproc", str(args.nproc), *SMALL, f"train.steps={args.steps}", f"checkpoint.every={args.every}"]
    with tempfile.TemporaryDirectory(prefix="chaos-") as name:
        folder = Path(name)
        straight, peace_s = undisturbed(folder, words)
        trial, faults = disturbed(folder, words, args.gap, args.seed)
        hurt_s = span_s(trial.lines())
        time.sleep(2.0)
        same = contents(straight) == contents(trial.run)
        left = left_over(trial.run)
        restarts, false_alarms = (
            sum(line.get("event") == "restarted" for line in run.lines()) for run in (trial.run, straight)
        )
    seconds = sorted(fault["recovery_s"] for fault in faults)
    p95 = seconds[min(len(seconds) - 1, int(0.95 * len(seconds)))] if seconds else 0.0
    print(f"{'fault':<20}  number  recovery: median  longest")
    for kind, number in sorted(Counter(fault["kind"] for fault in faults).items()):
        of_kind = [fault["recovery_s"] for fault in faults if fault["kind"] == kind]
        print(f"{kind:<20}  {number:>6}  {statistics.median(of_kind):>14.1f} s  {max(of_kind):>5.1f} s")
    print(f"faults   {len(faults)} in {hurt_s:.0f} s; recovery p95 {p95:.1f} s; {restarts} restarts by the launcher")
    print(f"alarms   {false_alarms} in {args.steps} steps without a fault")
    print(f"goodput  {100 * peace_s / hurt_s:.1f} %: {peace_s:.0f} s in peace, {hurt_s:.0f} s with faults")
    print(f"weights  {'the same bytes' if same else 'NOT the same bytes'} as the undisturbed run's")
    print(f"left     {left['processes']} processes, {left['scratch']} scratch directories")
    result = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "faults": faults,
        "recovery_p95_s": p95,
        "goodput": peace_s / hurt_s,
        "peace_s": peace_s,
        "hurt_s": hurt_s,
        "same": same,
        "left": left,
        "restarts": restarts,
        "false_alarms": false_alarms,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote    {args.out}")
    return 0 if same and not any(left.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
