"""Our trainer on CPU ranks over gloo against what people use instead: torch by hand, Accelerate, DeepSpeed.

    python benchmarks/peers_cpu.py [--ranks 2] [--rounds 220] [--over BASELINE ... | --variants NAME ...] [--out FILE]

Every rank holds all variants side by side: the same model, first weights, data, fused AdamW and clipping, fp32. First
each variant's losses and gradient norms are compared with one process that holds the whole batch; one that differs by
more than 1e-4 is not timed. Then rounds: one step of each on the same data, in random order, a barrier before each, the
slowest rank's time. Only ratios within a round count. The baselines stand twice (A/A): that shows how much of a ratio
is noise. A round takes as long as all its variants; `--over torch-ddp` takes only those that are measured over that
baseline.

A peer that is not installed is listed as such. To have all of them, in an environment of their own:

    python3 -m venv peers-env
    peers-env/bin/pip install --constraint constraints.txt torch accelerate==1.15.0 deepspeed==0.19.8 --editable .
    peers-env/bin/python benchmarks/peers_cpu.py --ranks 4

where torch is the CPU build. DeepSpeed compiles a small extension when it first starts and needs g++ for it. Nothing
else may run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import sys
import tempfile
import time
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch.multiprocessing
from peers.rank import LOSS_TOLERANCE, NORM_TOLERANCE, Job, run_rank
from peers.report import show, summarise
from peers.setting import Setting
from peers.variants import BASELINES, VARIANTS

PACKAGES = ("torch", "accelerate", "deepspeed", "shardwise")
BUSY = 0.5


def main() -> None:
    args = arguments(__doc__)
    measure(Setting(args.ranks, args.rows, args.seq_len, args.micro_batches, args.hidden, args.layers), args)


def measure(setting: Setting, args: argparse.Namespace) -> None:
    missing = {name: VARIANTS[name].missing for name in args.variants if VARIANTS[name].missing}
    cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        job = Job(
            setting=setting,
            names=tuple(name for name in args.variants if name not in missing),
            rounds=args.rounds,
            warmup=args.warmup,
            check_steps=args.check_steps,
            threads=max(1, cores // args.ranks),
            port=_free_port(),
            folder=Path(folder),
        )
        load = os.getloadavg()[0]
        if load > BUSY:
            print(f"load average {load:.1f} before it starts: others use this machine, and the figures will show it")
        for name, why in missing.items():
            print(f"  {name:<22} {why}")
        raw = _run(job)
    variants = {name: raw["variants"].get(name, {"status": missing.get(name)}) for name in args.variants}
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "cpus": cores,
        "cpu": _cpu_name(),
        "load_average_before": load,
        "ranks": args.ranks,
        "threads_per_rank": job.threads,
        "rounds": args.rounds,
        "setting": {**asdict(setting), "parameters": _num_parameters(setting)},
        "check": {"steps": args.check_steps, "loss_tolerance": LOSS_TOLERANCE, "norm_tolerance": NORM_TOLERANCE},
        **summarise(variants, raw["step_s"], args.ranks),
        "step_ms": {name: [round(1000 * s, 3) for s in seconds] for name, seconds in raw["step_s"].items()},
    }
    show(report)
    if args.out:
        args.out.write_text(_compact(report))


def arguments(about: str, **defaults: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=220)
    parser.add_argument("--warmup", type=int, default=5, help="rounds before those that count")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--over", nargs="+", choices=BASELINES, default=BASELINES, help="only what these are baselines of"
    )
    which.add_argument("--variants", nargs="+", choices=VARIANTS, metavar="NAME", help=", ".join(VARIANTS))
    parser.add_argument("--rows", type=int, default=4, help="sequences per rank and micro-batch")
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--micro-batches", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=256, help="a multiple of 64; 256 with 6 layers is `tiny`")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--check-steps", type=int, default=5, help="first steps whose losses must agree")
    parser.add_argument("--out", type=Path)
    parser.set_defaults(**defaults)
    args = parser.parse_args()
    args.variants = args.variants or [name for name, variant in VARIANTS.items() if variant.baseline in args.over]
    return args


def _num_parameters(setting: Setting) -> int:
    return sum(parameter.numel() for parameter in setting.new_model().parameters())


def _run(job: Job) -> dict[str, Any]:
    lo = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.update(OMP_NUM_THREADS=str(job.threads), GLOO_SOCKET_IFNAME=lo)  # before the ranks import torch
    try:
        torch.multiprocessing.spawn(run_rank, (job,), job.setting.ranks)
    except Exception:
        for log in sorted(job.folder.glob("rank*.log")):
            print(f"-- {log.name}\n{log.read_text()[-3000:]}", file=sys.stderr)
        raise
    return json.loads((job.folder / "result.json").read_text())


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _compact(report: dict[str, Any]) -> str:
    """JSON with one line per top-level key and per variant: readable, and raw times do not fill pages."""
    lines = []
    for key, value in report.items():
        if isinstance(value, dict) and key in ("variants", "step_ms"):
            rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in value.items())
            lines.append(f" {json.dumps(key)}: {{\n{rows}\n }}")
        else:
            lines.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
