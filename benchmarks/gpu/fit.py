"""The largest jobs that one GPU holds, through the engine that real runs use: peak memory beside the planner's
prediction.

    python benchmarks/gpu/fit.py [--cases 8b-adamw8bit ...] [--json FILE]

    8b-adamw8bit    llama3-8b, all weights, fp32 masters, 8-bit states, full recomputation
    8b-true         llama3-8b, all weights in bf16 with AdamW, selective recomputation
    3b-offload      llama3.2-3b, all weights, optimizer in CPU memory, full recomputation
    70b-qlora       llama3-70b in NF4 with adapters of rank 16 on all linear layers, full recomputation

Weights are copies of one random table, because drawing billions of elements on a CPU takes longer than what is
measured. The 70B matrices take the way of real ones: layer by layer to the GPU, where they are quantized to four bits.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwise.model.decoder import Decoder
from shardwise.parallel.apply import parallelize_decoder
from shardwise.plan.prediction.memory import predict_elsewhere, predict_memory
from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig, OptimizerConfig

GIB = 2**30
QLORA = AdapterConfig(kind="qlora", rank=16, targets=("all-linear",))
CASES: dict[str, dict[str, Any]] = {
    "8b-adamw8bit": dict(model="llama3-8b", precision="bf16", optimizer="adamw8bit", recompute="full"),
    "8b-true": dict(model="llama3-8b", precision="bf16-true", optimizer="adamw", recompute="selective"),
    "3b-offload": dict(model="llama3.2-3b", precision="bf16", optimizer="adamw", recompute="full", offload="optimizer"),
    "70b-qlora": dict(model="llama3-70b", precision="bf16-true", optimizer="adamw", recompute="full", adapter=QLORA),
}


def same_numbers(model: Decoder) -> None:
    """Fills a part of a model from one table of small random values."""
    table = torch.empty(2**24, dtype=next(model.parameters()).dtype)
    table.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            flat = parameter.view(-1)
            for first in range(0, flat.numel(), table.numel()):
                part = flat[first : first + table.numel()]
                part.copy_(table[: part.numel()])


def measure(case: dict[str, Any], seq_len: int, steps: int) -> dict[str, Any]:
    device, spec, adapter = torch.device("cuda", 0), preset(case["model"]), case.get("adapter", AdapterConfig())
    options = OptimizerConfig(name=case["optimizer"], lr=1e-5)
    trial = Trial(steps, 1, 1, seq_len, case["precision"], clip=1.0, optimizer=options, adapter=adapter)
    plan: Plan = replace(
        trial_plan(trial, recompute=case["recompute"], offload=case.get("offload", "none")), device="cuda"
    )
    began = time.perf_counter()
    engine = parallelize_decoder(spec, plan, 0, device, "auto", same_numbers, adapter=adapter)
    optimizer = engine.optimizer(options)
    built_s = time.perf_counter() - began
    torch.cuda.reset_peak_memory_stats(device)
    seconds, losses, clock = [], [], Clock(device)
    for step in range(1, steps + 1):
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        batch, num_targets = trial_batch(spec, plan, trial, step, 0)
        norm, finish = accumulate(engine, batch, num_targets, clock)
        update(engine, optimizer, norm, lr=options.lr, clip=1.0, clock=clock)
        losses.append(float(finish()[0]) / num_targets)
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    parts = predict_memory(spec, plan, options.name, adapter)
    peak, total = torch.cuda.max_memory_allocated(device), sum(parts.values())
    return {
        "layout": plan.layout,
        "precision": plan.precision,
        "optimizer": options.name,
        "parameters": spec.num_parameters,
        "trained": sum(p.numel() for p in engine.locals() if p.requires_grad),
        "tokens": seq_len,
        "built_s": built_s,
        "step_s": seconds,
        "losses": losses,
        "peak_gib": peak / GIB,
        "predicted_gib": total / GIB,
        "measured_over_predicted": peak / total,
        "predicted_parts_gib": {name: size / GIB for name, size in parts.items() if size},
        "host_gib": predict_elsewhere(spec, plan, options.name, adapter)["host"] / GIB,
        "within_5_percent": abs(peak / total - 1) <= 0.05,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for name in asked.cases:
        try:
            found[name] = measure(CASES[name], asked.tokens, asked.steps)
        except torch.OutOfMemoryError as error:
            found[name] = {"error": str(error).splitlines()[0]}
        print(name, json.dumps(found[name]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
