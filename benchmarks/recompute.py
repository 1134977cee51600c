"""What recomputation costs and saves: all modes on one model, step by step in turn, in one process.

    python benchmarks/recompute.py [--rounds 12] [--cuda] [--json FILE]

Every round runs one forward and backward of each mode in random order; only ratios within a round count. On a CPU the
time is the process's own (the machine may be shared) and bytes are counted tensor by tensor: what forward leaves for
backward. With --cuda time is the device's, and bytes are the allocator's peak over the weights and gradients, for a
block of a 1.5B model, 8 layers, 4096 tokens, bf16; activation offload is measured there too. `predicted` is the
planner's.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.memory.activation_offload import apply_activation_offload
from shardwise.memory.recompute import apply_recompute
from shardwise.memory.usage import saved_bytes
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.plan.prediction.activations import TokenShare, head_activation_bytes, kept_activations, logit_bytes
from shardwise.plan.prediction.lifetimes import LOSS_TEMPORARIES
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

MODES = ["none", "none again", "full", "selective", "sqrt", "every-2"]
WIDE = {"hidden": 768, "num_heads": 12, "num_kv_heads": 4, "head_dim": 64, "ffn": 2048, "num_layers": 4}
BILLION = {
    "hidden": 2048,
    "num_heads": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "ffn": 8192,
    "num_layers": 8,
    "vocab": 32768,
}
CPU_CASES = {"tiny, 4 x 256": ({}, (4, 256)), "768 wide, 2 x 256": (WIDE, (2, 256))}
CUDA_CASES = {"2048 wide, 1 x 4096": (BILLION, (1, 4096)), "2048 wide, 4 x 4096": (BILLION, (4, 4096))}
OFFLOADED = ["none, offloaded", "full, offloaded"]


class Variant:
    def __init__(self, spec: ModelSpec, name: str, weights: Decoder, device: torch.device):
        self.mode = name.split(",")[0].replace(" again", "")
        with device:
            self.model = Decoder(spec).to(next(weights.parameters()).dtype)
        for mine, theirs in zip(self.model.parameters(), weights.parameters(), strict=True):
            mine.data = theirs.data  # all variants share one set of weights and gradients
            mine.grad = theirs.grad
        blocks = list(self.model.layers.values())
        apply_recompute(blocks, self.mode)
        if "offloaded" in name:
            apply_activation_offload(blocks, device)

    def step(self, tokens: torch.Tensor) -> float:
        if not tokens.is_cuda:
            start = time.process_time()
            self.model(tokens, tokens).cross_entropy.backward()
            return time.process_time() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self.model(tokens, tokens).cross_entropy.backward()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3


def measure(spec: ModelSpec, shape: tuple[int, int], names: list[str], rounds: int, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with device:
        weights = Decoder(spec).to(dtype)
    initialize(weights, 0)
    for parameter in weights.parameters():
        parameter.grad = torch.zeros_like(parameter)
    variants = {name: Variant(spec, name, weights, device) for name in names}
    tokens = torch.randint(0, spec.vocab, shape, device=device)
    found: dict[str, dict[str, Any]] = {
        name: memory(spec, variant, tokens, dtype.itemsize) for name, variant in variants.items()
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds + 2):
        for name in random.sample(names, len(names)):
            times[name].append(variants[name].step(tokens))
    for name in names:
        ratios = [mine / plain for mine, plain in zip(times[name][2:], times["none"][2:], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        found[name] |= {"ms": 1e3 * statistics.median(times[name][2:]), "ratio": middle, "quartiles": [low, high]}
        print(f"{name:>16}  x{middle:.3f} ({low:.3f} to {high:.3f})  {found[name]}", flush=True)
    return found


def memory(spec: ModelSpec, variant: Variant, tokens: torch.Tensor, size: int) -> dict[str, Any]:
    counted = spec.with_overrides({"norm": "layer"}) if tokens.is_cuda else spec  # as plan/prediction/memory.py counts
    kept = kept_activations(counted, spec.layers, variant.mode, TokenShare(tokens.shape[1]))
    head = head_activation_bytes(counted, tokens.numel(), size)
    if not tokens.is_cuda:
        measured = saved_bytes(variant.model, tokens, tokens)
        return {"predicted": tokens.numel() * kept.between * size + head, "measured": measured}
    head += LOSS_TEMPORARIES["cuda"] * logit_bytes(spec, tokens.numel(), size)
    variant.step(tokens)
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    variant.step(tokens)
    peak = torch.cuda.max_memory_allocated() - before
    return {
        "predicted": tokens.numel() * kept.between * size + max(head, tokens.numel() * kept.repeated * size),
        "measured": peak,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if args.cuda else "cpu")
    torch.set_num_threads(1)
    random.seed(0)
    machine = torch.cuda.get_device_name() if args.cuda else f"{platform.machine()}, 1 thread"
    result: dict[str, Any] = {"machine": machine, "torch": torch.__version__, "rounds": args.rounds, "cases": {}}
    for case, (changes, shape) in (CUDA_CASES if args.cuda else CPU_CASES).items():
        print(case)
        names = MODES + (OFFLOADED if args.cuda else [])
        result["cases"][case] = measure(preset("tiny").with_overrides(changes), shape, names, args.rounds, device)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
