"""Owns the run directory: the one record of a run, append-only, readable while the run goes on.

    config.toml  plan.json  metrics.jsonl  events/rank*.jsonl  checkpoints/step-N/  crash/  log/  trace/

`metrics.jsonl` holds a line per step and lines with an "event" key (started, resumed, stopped, finished, failed). After
a resume some steps appear twice; the later line counts. Whoever trains holds `lock` from before the first file is
written (hold.py); nobody else may write. No torch here: `runs`, `watch` and `compare` live on this file.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.checkpoint.listing import at_step
from shardwise.errors import UserError
from shardwise.files import cannot_write, check_regular
from shardwise.foreign_json import read_object
from shardwise.run.clock import KINDS
from shardwise.run.hold import Hold, holder_of, is_held, is_paused
from shardwise.terminal import shell_word

FREE_TO_CHANGE = ("parallel", "memory", "speed", "comm", "run", "checkpoint")
"""The sections of a config that do not change what its run computes; anything else needs `--allow KEY` on resume."""

FINITE = ("tokens", "step_s", "peak_memory_bytes", "wall_time", *(f"{kind}_s" for kind in (*KINDS, "other")))
"""What a training line of metrics.jsonl has as a finite number in any case."""

NUMBERS = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", *FINITE)
"""What every training line has as numbers; null stands for one that is not finite."""

MIRROR_SIGN = ".mirror"
"""Marks a directory that mirrors another node's run (launch/nodes/mirror.py), and says of which."""


SILENT_S = 10.0


@dataclass(frozen=True)
class RunDir:
    """The directory of one run, and the names of the files in it."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def passed_over(self) -> Path:
        """The journal of batches that this run passes over, which does not exist for most runs (passed_over.py)."""
        return self.path / "passed-over.jsonl"

    @property
    def events(self) -> Path:
        return self.path / "events"

    def trace(self, rank: int) -> Path:
        """Returns the file of the steps that `run.profile` traces on one rank."""
        return self.path / "trace" / f"rank-{rank}.json.gz"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def crash(self) -> Path:
        return self.path / "crash"

    @property
    def exclude(self) -> Path:
        """The names of nodes that the checks before the start of a job would leave out, with commas between. It does
        not exist where all of them are well, or on one node."""
        return self.path / "exclude"

    @property
    def log(self) -> Path:
        return self.path / "log"

    @property
    def tokenizer(self) -> Path:
        """A copy of the tokenizer's files, so that the run can be used wherever it is moved. It does not exist for
        bytes."""
        return self.path / "tokenizer"

    @property
    def proof_job(self) -> Path:
        """The file that tells the ranks of `verify` what to prove."""
        return self.path / "proof-job.json"

    @property
    def proof(self) -> Path:
        return self.path / "proof.json"

    @property
    def stop_request(self) -> Path:
        return self.path / "stop"

    @property
    def own_parts(self) -> Path:
        """The file that names what a Python program brought to this run, such as its loss: the command line has none of
        it."""
        return self.path / "own-parts.json"

    def parts_of_a_program(self) -> list[str]:
        """Returns the names of train's arguments that a Python program brought to this run; mostly none."""
        return json.loads(self.own_parts.read_text())["parts"] if self.own_parts.is_file() else []

    def how_to_resume(self, *changes: str, allow: Sequence[str] = ()) -> str:
        """Returns what goes on with this run, with `changes` such as train.steps=40: a command, or the call of a Python
        program where one brought parts of its own."""
        if parts := self.parts_of_a_program():
            pairs = [(key, value) for key, is_key, value in (change.partition("=") for change in changes) if is_key]
            values = ", ".join(f'"{key}": {_in_python(value)}' for key, value in pairs)
            arguments = [*([f"{{{values}}}"] if pairs else []), *(f"{part}=..." for part in parts)]
            arguments += [f"allow={json.dumps(list(allow))}"] if allow else []
            return f"shardwise.load({json.dumps(str(self.path))}).resume({', '.join(arguments)}) in that program"
        return " ".join(["shardwise resume", shell_word(self.path), *(f"--allow {key}" for key in allow), *changes])

    def check_step(self, step: int | None) -> None:
        """Refuses to go on from a checkpoint that is not there; step 0 is the beginning, None the newest."""
        if step:
            at_step(self.checkpoints, step)

    def is_there(self) -> bool:
        """Returns whether the directory has not been removed."""
        return self.config.is_file()

    # --- reading -------------------------------------------------------------------------------------------------

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yields every complete line of metrics.jsonl, in order. A line cut short by a crash, or damaged, is passed
        over."""
        try:
            check_regular(self.metrics)
        except OSError:  # it is not there yet
            return
        with open(self.metrics, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    values = json.loads(line)
                except (ValueError, RecursionError):
                    continue
                if isinstance(values, dict) and _is_ours(values):
                    yield values

    def steps(self) -> dict[int, dict[str, Any]]:
        """Returns the training line of each step, in order of steps; after a resume the later line wins."""
        found: dict[int, dict[str, Any]] = {}
        for line in self.lines():
            if line.get("event") in ("resumed", "restarted"):
                found = {step: kept for step, kept in found.items() if step <= line.get("step", 0)}
            elif "event" not in line and _is_step(line):  # a null was a value that is not finite: see `to_json`
                found[line["step"]] = {key: math.nan if value is None else value for key, value in line.items()}
        return found

    def num_starts(self) -> int:
        """Returns how often training has begun or gone on."""
        return sum(line.get("event") in ("started", "resumed") for line in self.lines())

    def held_out_loss(self) -> float | None:
        """Returns the loss of the newest evaluation, in nats per token; None if there was none."""
        return next((line["eval_loss"] for line in reversed(list(self.lines())) if "eval_loss" in line), None)

    def last_event(self) -> dict[str, Any] | None:
        """Returns the newest line with an "event" key; None if there is none."""
        return next((line for line in reversed(list(self.lines())) if "event" in line), None)

    def state(self) -> str:
        """Returns `running`, `paused` where the process that trains is stopped, `finished`, `stopped`, `failed`, or
        `unfinished` where no process holds the run and no last event was written."""
        if self.is_locked():
            return "paused" if is_paused(self.path) and self._is_silent() else "running"
        event = self.last_event()
        return event["event"] if event and event["event"] in ("finished", "stopped", "failed") else "unfinished"

    def _is_silent(self) -> bool:
        """Returns whether no line was written for a while: ranks go on when somebody stops their launcher alone."""
        try:
            return time.time() - self.metrics.stat().st_mtime > SILENT_S
        except OSError:
            return True

    def read_plan(self) -> dict[str, Any]:
        """Returns the content of plan.json. It is empty if the file is missing or cannot be read: listing runs must not
        fail for one of them."""
        try:
            return read_object(self.plan)
        except (OSError, ValueError):
            return {}

    # --- writing -------------------------------------------------------------------------------------------------

    def append(self, line: dict[str, Any]) -> None:
        """Adds a line to metrics.jsonl; raises FileNotFoundError where the directory is gone."""
        self.config.stat()
        with open(self.metrics, "a", encoding="utf-8") as file:
            file.write(to_json(line) + "\n")

    def is_locked(self) -> bool:
        return is_held(self.path)

    def lock(self) -> Hold:
        """Holds the run until what is returned is closed or the process ends, however it ends.

        Its ranks hold it too (`join_lock`): a run whose launcher was killed is in use until its ranks have ended.
        """
        try:
            self.make_folders()
            if self.metrics.exists():
                check_regular(self.metrics)  # a pipe would be waited for
            hold = Hold(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from None
        if not hold.take(exclusive=True):
            hold.close()
            named = shell_word(self.path)
            raise UserError(
                f"run `{self.name}` is already in use",
                why=f"{holder_of(self.path)} is training in {self.path}",
                fix=f"`shardwise watch {named}` follows it, `shardwise stop {named}` ends it; "
                "or choose another run.name",
            )
        hold.sign()
        hold.take(exclusive=False)
        return hold

    def holder(self) -> str:
        """Returns who trains here, in words."""
        return holder_of(self.path)

    def make_folders(self) -> None:
        """Makes the folders that are missing: tools that copy a run may leave empty ones out."""
        for folder in (self.events, self.checkpoints, self.crash, self.log):
            folder.mkdir(exist_ok=True)

    def join_lock(self) -> Hold:
        """Holds a run that this process's launcher holds already, until what is returned is closed."""
        hold = Hold(self.path)
        hold.take(exclusive=False)
        return hold


def _is_ours(line: dict[str, Any]) -> bool:
    """Returns whether a line of metrics.jsonl has the kinds of values that are written there; anything else is
    damage."""
    numbers = [line.get(key) for key in (*NUMBERS, "eval_loss")]
    return (
        all(value is None or (isinstance(value, int | float) and not isinstance(value, bool)) for value in numbers)
        and isinstance(line.get("step", 0), int)
        and isinstance(line.get("event", ""), str)
    )


def _is_step(line: dict[str, Any]) -> bool:
    """Returns whether a line is one of training, with all that readers ask it for."""
    finite = all(math.isfinite(math.nan if (value := line.get(key)) is None else value) for key in FINITE)
    return finite and {"step", *NUMBERS} <= line.keys()


def to_json(value: Any, indent: int | None = None) -> str:
    """Returns JSON that every reader takes: a loss that is not finite, which Python would write as NaN, becomes
    null."""

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: plain(item) for key, item in part.items()}
        if isinstance(part, list | tuple):
            return [plain(item) for item in part]
        return None if isinstance(part, float) and not math.isfinite(part) else part

    return json.dumps(plain(value), indent=indent, allow_nan=False)


def create_run_dir(parent: str | Path, name: str | None, model_name: str) -> RunDir:
    """Makes a new run directory and returns it: NAME, or the first free MODEL-001, MODEL-002, …"""
    parent = Path(parent)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        run = RunDir(parent / name) if name else _first_free(parent, model_name)
        if name:
            run.path.mkdir()
        run.make_folders()
    except FileExistsError:
        raise UserError(
            f"run directory {parent / (name or '')} is already in use",
            why="a run is never overwritten",
            fix=f"`shardwise resume {shell_word(parent / (name or ''))}` goes on with it; or choose another run.name",
        ) from None
    except OSError as error:
        raise cannot_write(parent, error) from None
    return run


def _first_free(parent: Path, model_name: str) -> RunDir:
    stem = re.sub(r"[^\w.-]+", "-", model_name) or "run"
    number = 1
    while True:
        try:
            path = parent / f"{stem}-{number:03d}"
            path.mkdir()
            return RunDir(path)
        except FileExistsError:
            number += 1


def all_runs(parent: str | Path) -> list[RunDir]:
    """Returns the runs below a directory, oldest first."""
    parent = Path(parent)
    if not parent.is_dir():
        return []
    found = [RunDir(path) for path in parent.iterdir() if is_run(path)]
    return sorted(found, key=lambda run: (run.config.stat().st_mtime, run.name))


def is_run(path: Path) -> bool:
    return os.path.isfile(path / "config.toml")  # unlike Path.is_file, False where we may not look


def find_run(name: str, parent: str | Path = "runs") -> RunDir:
    """Returns the run that is named by its directory, by its name inside `parent`, or by `last`."""
    runs = all_runs(parent)
    if name == "last":
        if not runs:
            raise UserError("there is no last run", why=f"{parent} holds no run", fix="`shardwise train` starts one")
        return runs[-1]
    for path in (Path(name), Path(parent) / name):
        if is_run(path):
            return RunDir(path)
    known = ", ".join(run.name for run in runs[-5:]) or "none"
    above = next((path for path in Path(name).absolute().parents if is_run(path)), None)
    close = difflib.get_close_matches(name, [run.name for run in runs], n=1)
    fix = f"did you mean `{close[0]}`?" if close else "`shardwise runs` lists them; give a directory, a name, or `last`"
    if above is not None:
        fix = f"give the run that it belongs to: {shell_word(os.path.relpath(above))}"
    raise UserError(
        f"no run `{name}`",
        why=f"neither {name} nor {Path(parent) / name} has a config.toml; runs here: {known}",
        fix=fix,
    )


def _in_python(value: str) -> str:
    """Returns a value of a config word as a program writes it: numbers as they are, `…` for one to be chosen."""
    try:
        float(value)
    except ValueError:
        return "..." if value == "…" else json.dumps(value)
    return value
