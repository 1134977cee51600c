"""Offloading, measured against what the machine permits.

    adam    one optimizer step in CPU memory, ours and DeepSpeed's CPUAdam in turn, on the same cores
    disk    the optimizer phase with state on a disk: its bandwidth as a share of plain sequential transfers'
    model   a model whose state is three times memory.limit: step time against bytes over bandwidth
    --cuda  1 B parameters on one GPU: step time and peak memory without offloading, with `optimizer`, with `all`

    python benchmarks/offload.py [--parts adam disk model] [--cuda] [--dir DIR] [--json FILE]

DeepSpeed is used where it can be imported; it compiles its operation the first time (minutes), which is not measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.optim.build import build_optimizer
from shardwise.optim.offload.disk import BLOCK_BYTES, QUEUE_DEPTH, ScratchFile, new_buffer
from shardwise.optim.offload.nvme import NvmeOptimizer
from shardwise.optim.offload.optimizer import OffloadedOptimizer, OffloadedParts
from shardwise.plan.prediction.memory import predict_elsewhere, predict_memory
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import OptimizerConfig

CPU = torch.device("cpu")
ADAMW = OptimizerConfig(lr=1e-3)


class Plain:
    """A parameter that is not split."""

    def __init__(self, name: str, parameter: torch.nn.Parameter):
        self.name, self.parameter, self.local, self.elsewhere = name, parameter, parameter, OffloadedParts()

    @property
    def gradient(self) -> torch.Tensor | None:
        return self.parameter.grad

    gradient_here = gradient


def parameters(count: int, num_tensors: int) -> list[torch.nn.Parameter]:
    found = [torch.nn.Parameter(torch.randn(count // num_tensors // 1024, 1024) * 0.02) for _ in range(num_tensors)]
    for parameter in found:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return found


# In CPU memory --------------------------------------------------------------------------------------------------------


def compare_adam(count: int, rounds: int) -> dict[str, Any]:
    steps: dict[str, Callable[[], None]] = {}
    ours = OffloadedOptimizer(
        [Plain(str(n), p) for n, p in enumerate(parameters(count, 16))], partial(build_optimizer, ADAMW)
    )
    steps["ours"] = ours.step

    def clipped() -> None:
        ours.grad_factor = torch.tensor(0.999)
        ours.step()

    steps["ours, clipping"] = clipped
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        theirs_parameters = parameters(count, 16)
        theirs = DeepSpeedCPUAdam(theirs_parameters, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, adamw_mode=True)
        steps["deepspeed"] = theirs.step

        def theirs_clipped() -> None:
            torch._foreach_mul_([p.grad for p in theirs_parameters], 0.999)
            theirs.step()

        steps["deepspeed, clipping"] = theirs_clipped
        absent = None
    except Exception as error:
        absent = f"{type(error).__name__}: {error}"
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            if turn >= 2:
                times[name].append(time.perf_counter() - start)
    found: dict[str, Any] = {"parameters": count, "threads": torch.get_num_threads(), "rounds": rounds}
    found["seconds"] = {name: statistics.median(values) for name, values in times.items()}
    if absent is None:
        for tail in ("", ", clipping"):
            pairs = zip(times[f"ours{tail}"], times[f"deepspeed{tail}"], strict=True)
            found[f"ours over deepspeed{tail}"] = statistics.median(a / b for a, b in pairs)
    return found | {"deepspeed": absent or "measured"}


# On a disk ------------------------------------------------------------------------------------------------------------


def sequential(directory: Path, num_bytes: int) -> dict[str, float]:
    """Bytes per second of plain passes over a file: the same block size, queue and O_DIRECT, nothing else to do."""
    file, buffer = ScratchFile(directory, num_bytes), new_buffer(8 * BLOCK_BYTES)
    view = memoryview(buffer)
    rates = {}
    for name, move in (("first write", file.write), ("write", file.write), ("read", file.read)):
        start = time.perf_counter()
        waiting: list[Any] = []
        for offset in range(0, file.num_bytes - len(view) + 1, len(view)):
            waiting.append(move(offset, view))
            if len(waiting) > 1:
                waiting.pop(0).wait()
        for transfer in waiting:
            transfer.wait()
        rates[name] = file.num_bytes / (time.perf_counter() - start)
    file.close()
    return rates


def compare_disk(directory: Path, count: int, buffer: int, rounds: int) -> dict[str, Any]:
    held = [Plain(str(n), p) for n, p in enumerate(parameters(count, 16))]
    optimizer = NvmeOptimizer(held, partial(build_optimizer, ADAMW), CPU, directory, buffer)
    optimizer.step()  # makes the state
    size = optimizer.file.num_bytes
    in_memory = OffloadedOptimizer(
        [Plain(str(n), p) for n, p in enumerate(parameters(count, 16))], partial(build_optimizer, ADAMW)
    )
    in_memory.step()
    shares, steps, updates, rates = [], [], [], []
    for _ in range(rounds):
        start = time.perf_counter()
        in_memory.step()
        updates.append(time.perf_counter() - start)
        before = sequential(directory, size)
        start = time.perf_counter()
        optimizer.step()
        for slot in optimizer._buffers:  # what is still being written counts
            slot.under_way.wait()
        steps.append(time.perf_counter() - start)
        after = sequential(directory, size)
        # The disk's best of the two moments around the step: shares are not flattered by a slow one.
        best = {name: max(before[name], after[name]) for name in before}
        shares.append((size / best["read"] + size / best["write"]) / steps[-1])
        rates.append(best)
    optimizer.close()
    return {
        "state bytes": size,
        "buffer bytes": buffer,
        "block bytes": BLOCK_BYTES,
        "queue depth": QUEUE_DEPTH,
        "direct": optimizer.file.is_direct,
        "step seconds": steps,
        "the same update in memory, seconds": updates,
        "sequential bytes per second": rates,
        "share of sequential bandwidth": shares,
        "median share": statistics.median(shares),
    }


def large_model(directory: Path, layers: int, steps: int) -> dict[str, Any]:
    """Everything on the disk; memory.limit is what the planner says this run needs."""
    spec = preset("tiny").with_overrides(
        {
            "num_layers": layers,
            "hidden": 512,
            "num_heads": 8,
            "num_kv_heads": 8,
            "head_dim": 64,
            "ffn": 2048,
            "vocab": 256,
        }
    )
    trial = Trial(num_steps=steps, global_batch=1, micro_batch=1, seq_len=128, precision="fp32", clip=1.0)
    plan = trial_plan(trial, offload="all", offload_to="nvme", offload_dir=str(directory), offload_buffer=96 * 2**20)
    plan = replace(plan, threads_per_rank=torch.get_num_threads())
    limit = sum(predict_memory(spec, plan, "adamw").values())
    state = predict_elsewhere(spec, plan, "adamw")["disk"]
    rates = [sequential(directory, 2**30)]
    engine = build_trial(spec, plan, trial, 0, CPU)
    optimizer = engine.optimizer(trial.optimizer)
    times, losses, resident = [], [], 0
    for step in range(1, steps + 1):
        start = time.perf_counter()
        losses.append(one_step(engine, optimizer, spec, plan, trial, step))
        for slot in optimizer._buffers:  # type: ignore[attr-defined]
            slot.under_way.wait()
        times.append(time.perf_counter() - start)
        resident = max(resident, anonymous_bytes())
    rates.append(sequential(directory, 2**30))
    own = sum(shard.local.numel() for shard in engine.shards) * 4
    # Forward and backward read the parameters, backward writes gradients; the update reads four rows and writes three.
    read, written = 6 * own, 4 * own
    best = {name: max(rate[name] for rate in rates) for name in rates[0]}
    bound = read / best["read"] + written / best["write"]
    return {
        "parameters": own // 4,
        "state bytes": state,
        "memory.limit": limit,
        "state over limit": state / limit,
        "memory in use between steps": resident,
        "losses": losses,
        "step seconds": times,
        "bytes read and written": [read, written],
        "sequential bytes per second": rates,
        "bound seconds": bound,
        "step over bound": min(times[1:] or times) / bound,
    }


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0


def one_step(engine: Any, optimizer: Any, spec: ModelSpec, plan: Plan, trial: Trial, step: int) -> float:
    clock = Clock(engine.mesh.device)
    batch, num_targets = trial_batch(spec, plan, trial, step, 0)
    norm, finish = accumulate(engine, batch, num_targets, clock)
    update(engine, optimizer, norm, lr=1e-4, clip=trial.clip, clock=clock)
    return float(finish()[0]) / num_targets


# One GPU --------------------------------------------------------------------------------------------------------------


def on_cuda(steps: int) -> dict[str, Any]:
    device = torch.device("cuda", 0)
    sizes = {"num_layers": 16, "hidden": 2048, "num_heads": 32, "num_kv_heads": 8, "head_dim": 64, "ffn": 8192}
    spec = preset("tiny").with_overrides(sizes | {"vocab": 32768, "max_seq_len": 2048})
    trial = Trial(num_steps=steps, global_batch=8, micro_batch=8, seq_len=2048, precision="bf16", clip=1.0)
    found: dict[str, Any] = {"parameters": spec.num_parameters}
    for way in ("none", "optimizer", "all"):
        plan = replace(trial_plan(trial, offload=way), device="cuda")
        engine = build_trial(spec, plan, trial, 0, device)
        optimizer = engine.optimizer(trial.optimizer)
        torch.cuda.reset_peak_memory_stats(device)
        times, losses = [], []
        for step in range(1, steps + 1):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            losses.append(one_step(engine, optimizer, spec, plan, trial, step))
            torch.cuda.synchronize(device)
            times.append(time.perf_counter() - start)
        predicted = sum(predict_memory(spec, plan, "adamw").values())
        found[way] = {
            "step seconds": times,
            "losses": losses,
            "peak bytes": torch.cuda.max_memory_allocated(device),
            "predicted bytes": predicted,
            "host bytes predicted": predict_elsewhere(spec, plan, "adamw")["host"],
        }
        del engine, optimizer
        gc.collect()  # engines hold themselves in circles
        torch.cuda.empty_cache()
    return found


def results(args: argparse.Namespace, directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    if args.cuda:
        yield "cuda", on_cuda(steps=4)
        return
    if "adam" in args.parts:
        yield "adam", compare_adam(args.parameters, args.rounds)
    if "disk" in args.parts:
        yield "disk", compare_disk(directory, args.parameters, 256 * 2**20, max(2, args.rounds // 4))
    if "model" in args.parts:
        yield "model", large_model(directory, args.layers, steps=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=["adam", "disk", "model"], choices=["adam", "disk", "model"])
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--parameters", type=int, default=2**26)
    parser.add_argument("--layers", type=int, default=84)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dir", help="where the disk is measured; default: a temporary directory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(
        args.threads
    ):  # theirs may use another OpenMP, which reads it when it is loaded
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"OMP_NUM_THREADS": str(args.threads)})
    torch.set_num_threads(args.threads)
    device = torch.cuda.get_device_name(0) if args.cuda else platform.processor() or platform.machine()
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "device": device,
        "threads": args.threads,
    }
    with tempfile.TemporaryDirectory(dir=args.dir) as directory:
        for name, result in results(args, Path(directory)):
            found[name] = result
            print(name, json.dumps(result, indent=1), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
