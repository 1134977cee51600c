"""No trick moves the loss: the same short training with each trick alone, with all of them and with none, from one seed
on one text.

`none` is the plain eager run. `again` repeats it: what the device itself does not repeat. `halves` cuts its batch in
two: the same sums in another order, so its distance is what bf16's roundings make of nothing. fp8 takes large matrices
only, so it has a model of its own with 8B's width, and eager runs of that, `wide none` and `wide again`. Adapters over
a frozen base of that model, in bf16 (`lora none`) and in fp8, are compared with each other. A trick holds if the mean
loss of the last tenth is within 0.5 % of the eager run's (the bound that runs have for bf16), fp8 within 1 %. The file
has every loss of every run.
"""

from __future__ import annotations

import gc
import json
import platform
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from gpu.shapes import LORA, Shape, case_of
from gpu.with_ours import adapter_of, plan_of

from shardwise.data.loader import StepBatch, TensorBatch
from shardwise.model.initialize import initialize
from shardwise.parallel.apply import parallelize_decoder
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.schema import OptimizerConfig

LIMIT, FP8_LIMIT = 0.005, 0.01
LORA_LR = 3e-4
LR, WARM_UP = (
    1e-4,
    5,
)  # gentle, over a fifth of the steps: where a loss jumps, two runs of one program part by more (docs/log.md)
OFF = {
    "compile": "none",
    "fuse": "false",
    "copies": "false",
    "loss": "recompute",
    "kernels": "torch",
    "products": "library",
    "attention": "sdpa",
}
ALONE = {
    "compile": "blocks",
    "fuse": "true",
    "copies": "true",
    "loss": "fused",
    "kernels": "liger",
    "attention": "auto",
}
PLAIN_LORA = "ours:compile=none,products=library,attention=sdpa"
LORA_RUNS = {
    "lora none": PLAIN_LORA,
    "lora again": PLAIN_LORA,
    "lora all": "ours",
    "lora, fp8 tensorwise": "ours:precision=fp8,fp8_recipe=tensorwise",
    "lora, fp8 tensorwise, head too": "ours:precision=fp8,fp8_recipe=tensorwise,fp8_head=true",
}
FP8 = {"fp8 rowwise": "rowwise", "fp8 tensorwise": "tensorwise", "fp8 tensorwise, head too": "tensorwise,fp8_head=true"}
CHANGES = {
    "num_layers": 4,
    "hidden": 1024,
    "ffn": 4096,
    "num_heads": 16,
    "num_kv_heads": 4,
    "vocab": 65536,
    "tied": False,
}
GOLDEN = Shape("4 layers of 1024 x 4096, 65536 words, 8 x 1024", "llama3.2-1b", CHANGES, 8, 1024)
WIDE_LR = LR * CHANGES["hidden"] / 4096  # the wider the matrices, the smaller the steps that keep training calm
WIDE_CHANGES = {"num_layers": 4, "vocab": 32768}
WIDE = Shape("4 layers of 8B's width, 32768 words, 4 x 1024", "llama3-8b", WIDE_CHANGES, 4, 1024)
WORDS = 4096  # of the smoke's model; few, but more than bytes


def contender(**settings: str) -> str:
    return "ours:" + ",".join(f"{key}={value}" for key, value in settings.items())


RUNS = {
    "none": contender(**OFF),
    "again": contender(**OFF),
    "halves": contender(**OFF),
    **{f"{name} alone": contender(**{**OFF, name: value}) for name, value in ALONE.items()},
    "flash4 alone": contender(**{**OFF, "attention": "flash4"}),
    "compile, own kernels": contender(**{**OFF, "compile": "blocks", "kernels": "own"}),
    "all": "ours",
    "all, torch's products": "ours:products=library",
    "wide none": contender(**OFF),
    "wide again": contender(**OFF),
    "wide all": "ours",
    **{name: f"ours:precision=fp8,fp8_recipe={recipe}" for name, recipe in FP8.items()},
    "all, with graphs": "ours:compile=graphs",
    **LORA_RUNS,
}
SMOKE_RUNS = ("none", "again", "halves", "fuse alone", "loss alone")


def shape_of(name: str) -> Shape:
    if name in LORA_RUNS:
        return replace(WIDE, adapter=LORA)
    return WIDE if name.startswith("wide") or name in FP8 else GOLDEN


def lr_of(name: str) -> float:
    if name in LORA_RUNS:
        return LORA_LR
    return LR if shape_of(name) is GOLDEN else WIDE_LR


def reference_of(name: str) -> str:
    if name in LORA_RUNS:
        return "lora none"
    return "none" if shape_of(name) is GOLDEN else "wide none"


def train(shape: Shape, name: str, steps: list[TensorBatch], device: str, lr: float) -> dict[str, Any]:
    """The losses of a run. Weights are drawn by name, so that every layout of them starts from the same numbers."""
    case = replace(case_of("1.5b", RUNS[name], device=device), shape=shape)
    plan, values = plan_of(case), OptimizerConfig(lr=lr)
    if name == "halves":
        plan = replace(plan, micro_batch=plan.global_batch // 2)
    place = torch.device(device)
    attention = case.options.get("attention", "auto")
    engine = parallelize_decoder(
        shape.spec,
        plan,
        0,
        place,
        attention,
        lambda model: initialize(model, 0),
        adapter=adapter_of(case),
    )
    optimizer, clock, losses = engine.optimizer(values), Clock(place), []
    warm_up = max(1, len(steps) // WARM_UP)
    for number, batch in enumerate(steps, 1):
        micro = [batch.rows(first, first + plan.micro_batch) for first in range(0, plan.global_batch, plan.micro_batch)]
        num_targets = batch.targets.numel()
        clock.begin()
        norm, finish = accumulate(engine, StepBatch(number, micro, num_targets), num_targets, clock)
        update(engine, optimizer, norm, lr=lr * min(1.0, number / warm_up), clip=1.0, clock=clock)
        losses.append(float(finish()[0]) / num_targets)
    fp8 = str(engine.float8) if engine.float8 else None
    kernel = engine.models[0].kernel_reason or engine.models[0].kernel.name
    return {"contender": RUNS[name], "model": shape.title, "fp8": fp8, "attention": kernel, "losses": losses}


def compared(losses: list[float], truth: list[float], limit: float) -> dict[str, Any]:
    last = max(1, len(truth) // 10)
    off = statistics.mean(losses[-last:]) / statistics.mean(truth[-last:]) - 1
    distances = [abs(one - other) for one, other in zip(losses, truth, strict=True)]
    return {
        "first_difference": distances[0],
        "max_difference": max(distances),
        "last_tenth_off": off,
        "limit": limit,
        "holds": abs(off) <= limit,
    }


def golden(path: Path | None, *, steps: int, smoke: bool = False, only: list[str] | None = None) -> bool:
    """Whether all of them hold."""
    from precision import batches, text  # here, because it sets what oneDNN may use

    if not smoke and not torch.cuda.is_available():
        raise SystemExit(
            "error: golden losses need a GPU\n  why  torch finds no CUDA device here\n  fix  --smoke runs a tiny model "
            "on a CPU"
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path and path.exists() else {"runs": {}}
    device = "cpu" if smoke else "cuda"
    tiny = {**CHANGES, "num_layers": 2, "hidden": 64, "ffn": 160, "vocab": WORDS}
    small = replace(GOLDEN, title="tiny", changes=tiny, seq_len=64) if smoke else GOLDEN
    found |= {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "model": small.title,
        "wide_model": WIDE.title,
        "steps": steps,
    }
    for name in only or (SMOKE_RUNS if smoke else RUNS):
        if "losses" in found["runs"].get(name, {}):
            continue
        taken, began = small if smoke else shape_of(name), time.perf_counter()
        data = batches(text(), steps, taken.micro_batch, taken.seq_len)
        try:
            found["runs"][name] = train(taken, name, data, device, 3e-3 if smoke else lr_of(name))
        except Exception as error:  # one trick that fails must not take the others' figures with it
            found["runs"][name] = {"contender": RUNS[name], "error": f"{type(error).__name__}: {error}"[:500]}
        found["runs"][name]["seconds"] = time.perf_counter() - began
        gc.collect()
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()
        judge(found)
        print(line_of(name, found["runs"][name]), flush=True)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    verdicts = {name: run["holds"] for name, run in found["runs"].items() if "holds" in run}
    moved = [name for name, holds in verdicts.items() if not holds]
    print(f"{len(verdicts) - len(moved)} of {len(verdicts)} hold{': not ' + ', '.join(moved) if moved else ''}")
    return not moved


def judge(found: dict[str, Any]) -> None:
    for name, run in found["runs"].items():
        reference = reference_of(name)
        truth = found["runs"].get(reference, {}).get("losses")
        if truth and "losses" in run and name != reference:
            run |= compared(run["losses"], truth, FP8_LIMIT if "fp8" in name else LIMIT)


def line_of(name: str, run: dict[str, Any]) -> str:
    if name == reference_of(name) and "losses" in run:
        return f"{name:<32}last loss {run['losses'][-1]:.4f}   what the others are compared with"
    if "holds" not in run:
        missing = f"nothing to compare with yet: run `{reference_of(name)}` first"
        return f"{name:<32}{run.get('error', missing)}"
    return (
        f"{name:<32}last loss {run['losses'][-1]:.4f}   off by {run['last_tenth_off']:+.3%} (limit {run['limit']:.1%}) "
        "  "
        f"largest difference {run['max_difference']:.5f}, first {run['first_difference']:.6f}   "
        f"{'holds' if run['holds'] else 'MOVES THE LOSS'}"
    )
