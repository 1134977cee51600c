"""What it costs to compare replicas bit by bit (`run.check_replicas`), as a share of a step.

    python benchmarks/replica_check.py [--steps 30] [--out FILE]

`tiny` with the default run's batch on two real ranks, dp=2: all parameters and both states of AdamW are held twice. In
every step the digests are taken and timed from outside, by the wall clock and by seconds of the processor; they travel
in the step's own all-reduce as 8 bytes per rank and set. The cost is what they take over what a step takes, divided by
the default interval.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.replica_check import ReplicaCheck
from shardwise.run.step import run_step
from shardwise.spec.presets import preset
from shardwise.spec.schema import RunConfig

CPU = torch.device("cpu")
TARGET = 0.005
TRIAL = Trial(global_batch=16, micro_batch=2, seq_len=256, precision="fp32")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        meeting = Path(folder) / "meeting"
        torch.multiprocessing.spawn(_rank, (args.steps, meeting), nprocs=2)
        found = json.loads(meeting.with_suffix(".json").read_text())
    every = RunConfig().check_replicas
    for kind in ("wall", "processor"):
        step, digests = found[f"step_{kind}_s"], found[f"digests_{kind}_s"]
        found[f"cost_{kind}"] = digests / step / every
        print(f"{kind:10} step {step:.3f} s, digests {1e3 * digests:.2f} ms: {digests / step / every:.4%} of a step")
    versions = {"torch": torch.__version__, "python": platform.python_version(), "date": str(date.today())}
    found |= {"every": every, "target": TARGET, "holds": found["cost_processor"] < TARGET, **versions}
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


def _rank(rank: int, num_steps: int, meeting: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    found = _measure(rank, num_steps)
    if rank == 0:
        meeting.with_suffix(".json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _measure(rank: int, num_steps: int) -> dict[str, Any]:
    spec, plan = preset("tiny"), trial_plan(TRIAL, dp=2)
    engine = build_trial(spec, plan, TRIAL, rank, CPU)
    optimizer = engine.optimizer(TRIAL.optimizer)
    batch, num_targets = trial_batch(spec, plan, TRIAL, 1, engine.mesh.at.dp)
    check = ReplicaCheck(engine, optimizer, every=1, done=0)
    taken: dict[str, list[float]] = {"step_wall": [], "step_processor": [], "digests_wall": [], "digests_processor": []}
    for number in range(num_steps + 1):
        began, began_cpu = time.perf_counter(), time.process_time()
        run_step(engine, optimizer, batch, num_targets=num_targets, lr=1e-4, clip=1.0, clock=Clock(CPU))
        stepped, stepped_cpu = time.perf_counter(), time.process_time()
        float(check.digests().sum())
        ended, ended_cpu = time.perf_counter(), time.process_time()
        times = (stepped - began, stepped_cpu - began_cpu, ended - stepped, ended_cpu - stepped_cpu)
        for values, seconds in zip(taken.values(), times, strict=True):
            values.extend([seconds] if number else [])  # the first one warms up
    tensors = [tensor for members in check._sets for _, tensor in check._tensors(members)]
    about = {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors), "steps": num_steps}
    return about | {f"{key}_s": statistics.median(values) for key, values in taken.items()}


if __name__ == "__main__":
    main()
