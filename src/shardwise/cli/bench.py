"""`shardwise bench layers|collectives|step` measures what operations, links and whole steps reach on this machine. The
first two can go into a cluster file."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.cluster.describe.changes import unknown
from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import this_machine
from shardwise.cluster.describe.toml import cluster_from_toml, write_toml
from shardwise.cluster.measure.collectives import (
    CollectiveTime,
    fit_collectives,
    measure_collectives,
    with_collectives,
    worlds_of,
)
from shardwise.cluster.measure.layers import LayerRates, devices_of, measure_layers, with_layers
from shardwise.cluster.measure.link import LinkNotMeasured
from shardwise.config.units import format_bytes, format_count
from shardwise.errors import Exit, UserError
from shardwise.files import write_atomically
from shardwise.spec.cluster import ClusterSpec
from shardwise.terminal import counted, say_error

HELP = """Measure parts of a training step on this machine.

layers        matmuls, attention and passes over memory by size, on every device at once
collectives   all-reduce, all-gather, reduce-scatter, all-to-all between the processes of this machine
step          a few steps of training, measured beside predicted; takes section.key=value words"""
CONFIG = True
REPORTS = True
SUBJECTS = ("layers", "collectives", "step")
STEPS = 8


class Ended(Exception):
    """A training process did not finish."""

    def __init__(self, code: int):
        self.code = code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", help="layers, collectives or step")
    parser.add_argument("--out", metavar="FILE", help="put the result into this cluster file (made if it is not there)")
    parser.add_argument("--config", metavar="FILE", help="step: the config of a run")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"step: how many (default {STEPS})")


def run(args: argparse.Namespace) -> int:
    if args.subject not in SUBJECTS:
        raise unknown("measurement", args.subject, SUBJECTS, None)
    if args.subject != "step" and (args.overrides or args.config or args.steps != STEPS):
        word = args.overrides[0] if args.overrides else "--config" if args.config else "--steps"
        raise UserError(
            f"`{word}` cannot be used with `bench {args.subject}`", why="it trains nothing", fix="leave it out"
        )
    if args.subject == "step" and args.out:
        raise UserError(
            "`bench step` writes no cluster file",
            why="it compares a prediction with a run, and measures no device",
            fix="leave out --out",
        )
    try:
        report = {"layers": _layers, "collectives": _collectives, "step": _step}[args.subject](args)
    except Ended as training:  # it has said why
        return training.code
    print(json.dumps({"schema": 1, **report}, indent=2) if args.json else "\n".join(report["text"]))
    return Exit.DONE


def _layers(args: argparse.Namespace) -> dict[str, Any]:
    machine = this_machine()
    current = _existing(args.out)
    devices = devices_of(machine)
    _progress(f"layers on {_count(devices)} (loads torch)")
    rates = measure_layers(devices)
    if not rates.curves:
        why = "; ".join(f"{name}: {reason}" for name, reason in rates.problems.items())
        raise UserError(
            "nothing could be measured",
            why=why or "the measuring process gave no answer",
            fix="`shardwise doctor` looks at this machine",
        )
    text = [f"devices   {_count(devices)}", *_curve_lines(rates)]
    _store(args.out, current, lambda cluster: with_layers(cluster, rates), text)
    return {
        "devices": list(devices),
        "launch_s": rates.launch,
        "curves": rates.curves,
        "problems": rates.problems,
        "text": text,
    }


def _curve_lines(rates: LayerRates) -> list[str]:
    lines = []
    for name, curve in rates.curves.items():
        unit = "B" if name == "elementwise" else "FLOP"
        lines.append(f"{name:<24} " + "   ".join(f"{_amount(x)}{unit}: {_amount(rate)}{unit}/s" for x, rate in curve))
    if rates.launch is not None:
        lines.append(f"{'launch':<24} {rates.launch * 1e6:.1f} us of the host per operation")
    return [*lines, *(f"{name} does not work here ({reason})" for name, reason in rates.problems.items())]


def _amount(value: float) -> str:
    """Returns a number such as `120 G`, to put a unit behind."""
    return format_count(value).replace("B", "G") + ("" if value >= 999.5 else " ")


def _collectives(args: argparse.Namespace) -> dict[str, Any]:
    machine = this_machine()
    current = _existing(args.out)
    backend, worlds = "nccl" if len(machine.gpus) > 1 else "gloo", worlds_of(machine)
    if not worlds or len(machine.gpus) == 1:
        why = "collectives need two GPUs, or without a GPU two cores"
        raise UserError(
            "one device cannot time collectives", why=why, fix="`shardwise bench layers` measures a single one"
        )
    _progress(f"collectives of {', '.join(map(str, worlds))} ranks over {backend} (loads torch)")
    try:
        points = measure_collectives(worlds, backend)
    except LinkNotMeasured as problem:
        fix = "`shardwise doctor` looks at this machine"
        raise UserError(
            "the processes that time collectives have failed", why=str(problem), fix=fix, code=Exit.HARDWARE
        ) from None
    fits = fit_collectives(points)
    text = [f"{'collective':<16}{'ranks':>6}{'size':>10}{'measured':>12}{'fitted':>12}"]
    text += [_timed_line(point, fits[point.collective].seconds(point)) for point in points]
    text += [
        f"{name:<16} alpha {fit.alpha * 1e6:.1f} us per step, {fit.rate / 1e9:.2f} GB/s" for name, fit in fits.items()
    ]
    _store(args.out, current, lambda cluster: with_collectives(cluster, points), text)
    return {
        "backend": backend,
        "points": [{**vars(point), "fitted": fits[point.collective].seconds(point)} for point in points],
        "fits": {name: {"alpha_s": fit.alpha, "bytes_per_s": fit.rate} for name, fit in fits.items()},
        "text": text,
    }


def _timed_line(point: CollectiveTime, fitted: float) -> str:
    size = format_bytes(point.size)
    return f"{point.collective:<16}{point.ranks:>6}{size:>10}{point.seconds * 1e3:>9.3f} ms{fitted * 1e3:>9.3f} ms"


def _step(args: argparse.Namespace) -> dict[str, Any]:
    """Trains in a scratch directory and returns the report; the run itself sets what it measured beside what was
    predicted."""
    from shardwise.report.predicted_and_measured import comparison_lines
    from shardwise.run.rundir import RunDir

    if args.steps < 3:
        why = "the first step warms up and does not count"
        raise UserError(f"--steps {args.steps} is too few", why=why, fix=f"--steps {STEPS}")
    _progress(f"{args.steps} steps of training")
    with tempfile.TemporaryDirectory(prefix="shardwise-bench-") as folder:
        command = [sys.executable, "-m", "shardwise", "train", *([args.config] if args.config else []), "--no-verify"]
        words = [*args.overrides, f"run.dir={folder}", "run.name=bench", f"train.steps={args.steps}"]
        done = subprocess.run([*command, *words], capture_output=True, text=True)
        if done.returncode != 0:
            sys.stderr.write(done.stderr)
            raise Ended(done.returncode)
        found = RunDir(Path(folder) / "bench").read_plan()["measured"]
    return {**found, "text": comparison_lines(found)}


def _existing(path: str | None) -> ClusterSpec | None:
    """Returns the cluster that the file describes so far. It is read before anything is measured, so that a file that
    cannot be read costs no time."""
    if not path or not Path(path).exists():
        return None
    cluster, here = cluster_from_toml(path), this_cluster(this_machine())
    if cluster.device.name != here.device.name:
        why = f"it describes {cluster.device.name}, and this machine has {here.device.name}"
        raise UserError(f"{path} describes another machine", why=why, fix="give --out another name")
    return cluster


def _store(
    path: str | None, current: ClusterSpec | None, change: Callable[[ClusterSpec], ClusterSpec], text: list[str]
) -> None:
    if not path:
        return
    machine = tomllib.loads(Path(path).read_text(encoding="utf-8")).get("machine") if current else None
    cluster = change(current or this_cluster(this_machine()))
    write_atomically(path, write_toml(cluster, ("Measured by `shardwise doctor` and `shardwise bench`.",), machine))
    text.append(f"wrote     {path}")


def _count(devices: tuple[str, ...]) -> str:
    return f"{len(devices)} cores" if devices[0] == "cpu" else counted(len(devices), "GPU")


def _progress(what: str) -> None:
    """Prints a line to stderr, so that `--json` stays one document."""
    say_error(f"measuring {what} ...")
