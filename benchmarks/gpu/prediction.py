"""Step time and peak memory of many jobs on one GPU beside what the planner predicts for them.

    python benchmarks/gpu/prediction.py [--set fitted|held_out|other_families] [--cases NAME ...] [--json FILE]
    python benchmarks/gpu/prediction.py --again FILE       predict the measured jobs of FILE anew; no GPU, no torch

Every job runs through the engine that real runs use, a few steps on made-up batches. The planner's constants for this
card were chosen with the set `fitted`. `held_out` was measured afterwards and led to corrections; `other_families` came
after these, unseen by the planner.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from shardwise.cluster.describe.table import known_cluster
from shardwise.plan.prediction.predict import predict
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig, OptimizerConfig

GIB = 2**30
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "1.5b": ("llama3.2-1b", dict(num_layers=16, hidden=2048, ffn=8192, num_heads=32, num_kv_heads=8, tied=False)),
    "8b-wide": ("llama3-8b", dict(num_layers=8)),
    "70b-wide": ("llama3-70b", dict(num_layers=2)),
    "8b": ("llama3-8b", {}),
    "135m": ("smollm2-135m", {}),
    "gpt2": ("gpt2", {}),
    "qwen": ("qwen3-0.6b", {}),
    "3b": ("llama3.2-3b", {}),
    "13b-wide": ("llama2-13b", dict(num_layers=5)),
    "gemma": ("gemma2-2b", dict(num_layers=12)),
    "mistral": ("mistral-7b", dict(num_layers=6)),
    "mixtral": ("mixtral-8x7b", dict(num_layers=2)),
    "360m": ("smollm2-360m", {}),
    "gpt2-xl": ("gpt2-xl", {}),
    "qwen2.5": ("qwen2.5-1.5b", {}),
    "latent": (
        "deepseek-v3",
        dict(
            num_layers=4,
            hidden=2048,
            num_heads=16,
            num_kv_heads=16,
            ffn=8192,
            expert_ffn=1024,
            num_experts=16,
            vocab=32000,
            first_dense_layers=1,
        ),
    ),
    "7b-wide": ("llama2-7b", dict(num_layers=6)),
    "moe": (
        "tiny-moe",
        dict(
            num_layers=8,
            hidden=2048,
            num_heads=16,
            num_kv_heads=16,
            ffn=1024,
            vocab=50304,
            num_experts=64,
            experts_per_token=8,
            expert_ffn=1024,
            moe_every=1,
            max_seq_len=4096,
        ),
    ),
}
LORA = dict(kind="lora", rank=16, targets=("all-linear",))


def case(shape: str, batch: int, seq: int = 4096, **more: Any) -> dict[str, Any]:
    return {"shape": shape, "micro_batch": batch, "seq_len": seq, **more}


SETS: dict[str, dict[str, dict[str, Any]]] = {
    "fitted": {
        "1.5b mb1": case("1.5b", 1),
        "1.5b mb2": case("1.5b", 2),
        "1.5b mb4": case("1.5b", 4),
        "1.5b mb8": case("1.5b", 8),
        "1.5b mb2 x4": case("1.5b", 2, micro_batches=4),
        "1.5b mb4 full": case("1.5b", 4, recompute="full"),
        "1.5b mb4 selective": case("1.5b", 4, recompute="selective"),
        "1.5b mb4 true": case("1.5b", 4, precision="bf16-true"),
        "8b-wide mb1": case("8b-wide", 1),
        "8b-wide mb4": case("8b-wide", 4),
        "8b-wide mb1 32k": case("8b-wide", 1, 32768, recompute="selective"),
        "135m mb4": case("135m", 4, 2048),
        "135m mb32": case("135m", 32, 2048),
        "gpt2 mb16": case("gpt2", 16, 1024),
        "moe mb2": case("moe", 2),
        "70b-wide mb2": case("70b-wide", 2),
        "8b lora mb2": case("8b", 2, 2048, adapter=LORA, precision="bf16-true"),
    },
    "held_out": {
        "qwen mb4": case("qwen", 4),
        "qwen mb8 full": case("qwen", 8, recompute="full"),
        "3b mb1": case("3b", 1, recompute="selective"),
        "3b mb2 x2": case("3b", 2, micro_batches=2, recompute="full"),
        "7b-wide mb4 2k": case("7b-wide", 4, 2048),
        "7b-wide mb2 8k": case("7b-wide", 2, 8192),
        "8b-wide mb2": case("8b-wide", 2),
        "8b-wide mb1 16k sqrt": case("8b-wide", 1, 16384, recompute="sqrt"),
        "1.5b mb6": case("1.5b", 6),
        "1.5b mb16 1k": case("1.5b", 16, 1024),
        "gpt2 mb4": case("gpt2", 4, 1024),
        "135m mb16": case("135m", 16, 1024),
        "moe mb4 full": case("moe", 4, recompute="full"),
        "8b qlora mb2": case("8b", 2, 2048, adapter={**LORA, "kind": "qlora"}, precision="bf16-true"),
        "70b-wide mb1": case("70b-wide", 1),
        "3b adam8 mb1": case("3b", 1, optimizer="adamw8bit"),
    },
    "other_families": {
        "13b-wide mb2": case("13b-wide", 2),
        "gemma mb2": case("gemma", 2, 2048),
        "mistral mb1 16k": case("mistral", 1, 16384, recompute="selective"),
        "mixtral mb2": case("mixtral", 2, 2048),
        "360m mb8": case("360m", 8, 2048),
        "360m mb8 full": case("360m", 8, 2048, recompute="full"),
        "gpt2-xl mb4": case("gpt2-xl", 4, 1024),
        "qwen2.5 mb2": case("qwen2.5", 2),
        "qwen2.5 lora mb4": case("qwen2.5", 4, 2048, adapter=LORA, precision="bf16-true"),
        "latent mb2": case("latent", 2),
        "3b true mb1 x4": case("3b", 1, 2048, micro_batches=4, precision="bf16-true"),
        "1.5b mb4 every-2": case("1.5b", 4, recompute="every-2"),
    },
}


def spec_of(one: dict[str, Any]) -> ModelSpec:
    name, changes = SHAPES[one["shape"]]
    return preset(name).with_overrides(changes)


def plan_of(one: dict[str, Any]) -> Plan:
    return Plan(
        device="cuda",
        precision=one.get("precision", "bf16"),
        seq_len=one["seq_len"],
        global_batch=one["micro_batch"] * one.get("micro_batches", 1),
        micro_batch=one["micro_batch"],
        num_steps=8,
        threads_per_rank=4,
        reason="",
        recompute=one.get("recompute", "none"),
        loss="recompute",
    )


def adapter_of(one: dict[str, Any]) -> AdapterConfig:
    return AdapterConfig(
        **{**one.get("adapter", {}), "targets": tuple(one.get("adapter", {}).get("targets", ("q", "k", "v", "o")))}
    )


def predicted(one: dict[str, Any], kind: str) -> dict[str, Any]:
    spec, plan, optimizer = spec_of(one), plan_of(one), one.get("optimizer", "adamw")
    job = Job(plan.seq_len, plan.global_batch, None, plan.precision, optimizer, adapter_of(one))
    found = predict(spec, known_cluster(kind, 1, 1), job, plan)
    return {"step_s": found.step_s, "memory_bytes": found.memory_bytes, "step": found.step}


def measure(one: dict[str, Any], warm_up: int = 2, steps: int = 5) -> dict[str, Any]:
    import torch
    from gpu.fit import same_numbers

    from shardwise.parallel.apply import parallelize_decoder
    from shardwise.prove.reference import Trial
    from shardwise.prove.trial import trial_batch
    from shardwise.run.clock import Clock
    from shardwise.run.step import accumulate, update

    device, spec, plan, adapter = torch.device("cuda", 0), spec_of(one), plan_of(one), adapter_of(one)
    options = OptimizerConfig(name=one.get("optimizer", "adamw"), lr=1e-5)
    trial = Trial(
        8,
        plan.global_batch,
        plan.micro_batch,
        plan.seq_len,
        plan.precision,
        clip=1.0,
        optimizer=options,
        adapter=adapter,
    )
    engine = parallelize_decoder(spec, plan, 0, device, "auto", same_numbers, adapter=adapter)
    optimizer = engine.optimizer(options)
    torch.cuda.reset_peak_memory_stats(device)
    clock = Clock(device)
    seconds, parts = [], []
    for step in range(1, warm_up + steps + 1):
        batch, num_targets = trial_batch(spec, plan, trial, step, 0)
        torch.cuda.synchronize(device)
        clock.begin()
        began = time.perf_counter()
        norm, finish = accumulate(engine, batch, num_targets, clock)
        update(engine, optimizer, norm, lr=options.lr, clip=1.0, clock=clock)
        finish()
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
        parts.append(clock.finish())
    peak = torch.cuda.max_memory_allocated(device)
    del engine, optimizer, norm, finish, batch
    last = parts[warm_up:]
    return {
        "step_s": statistics.median(seconds[warm_up:]),
        "all_step_s": seconds,
        "memory_bytes": peak,
        "parts": {
            name: statistics.median(part[name] for part in last) for name in last[0] if isinstance(last[0][name], float)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="fitted", choices=list(SETS))
    parser.add_argument("--cases", nargs="+")
    parser.add_argument("--again", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    if asked.again:
        table(json.loads(asked.again.read_text(encoding="utf-8")))
        return
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import torch

    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "kind": "h200",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "set": asked.set,
        "cases": {},
    }
    for name, one in SETS[asked.set].items():
        if asked.cases and name not in asked.cases:
            continue
        began = time.perf_counter()
        try:
            found["cases"][name] = {**one, "measured": measure(one), "predicted_then": predicted(one, "h200")}
        except torch.OutOfMemoryError as error:
            found["cases"][name] = {**one, "error": str(error).splitlines()[0]}
        except Exception as error:  # one job that fails must not take the others' figures with it
            found["cases"][name] = {**one, "error": f"{type(error).__name__}: {error}"}
        gc.collect()
        torch.cuda.empty_cache()
        print(
            name,
            f"{time.perf_counter() - began:.0f} s",
            json.dumps(found["cases"][name].get("measured", found["cases"][name]))[:400],
            flush=True,
        )
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    table(found)


def table(found: dict[str, Any]) -> None:
    print(f"{'job':<24}{'step':>10}{'predicted':>11}{'ratio':>7}{'memory':>12}{'predicted':>11}{'ratio':>7}")
    times, memories = [], []
    for name, one in found["cases"].items():
        if "measured" not in one:
            print(f"{name:<24}{one.get('error', '')[:90]}")
            continue
        here, then = one["measured"], predicted(one, found["kind"])
        times.append(then["step_s"] / here["step_s"])
        memories.append(then["memory_bytes"] / here["memory_bytes"])
        print(
            f"{name:<24}{here['step_s'] * 1e3:>7.1f} ms{then['step_s'] * 1e3:>8.1f} ms{times[-1]:>7.2f}"
            f"{here['memory_bytes'] / GIB:>8.1f} GiB{then['memory_bytes'] / GIB:>7.1f} GiB{memories[-1]:>7.3f}"
        )
    for word, ratios in (("step time", times), ("memory", memories)):
        errors = sorted(abs(ratio - 1) for ratio in ratios)
        if errors:
            print(f"{word}: median error {statistics.median(errors):.1%}, largest {errors[-1]:.1%}, of {len(errors)}")


if __name__ == "__main__":
    main()
