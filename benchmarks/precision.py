"""Number formats side by side: loss curves, step time and peak memory of one model on the same batches.

    python benchmarks/precision.py                           fp32, bf16, fp16 and fp16-true on a CPU, a small model
    python benchmarks/precision.py --cuda --json FILE        bf16, fp16, fp8 (rowwise, tensorwise) on a GPU, 100 steps

Weights and batches are drawn from one seed. Text is what a curve needs to fall: bytes of Python's own library. Band:
the mean loss of the last tenth of the steps is within 1 % of bf16's for fp16, and within 2 % for fp8. The model of
--cuda has blocks of 4096 x 14336, of which fp8 takes the large matrices; its line says which stay in bf16. Everything
is eager: compiled blocks would make fp8's casts cheaper.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # some machines announce AMX and forbid it

import torch

from shardwise.data.loader import StepBatch, TensorBatch
from shardwise.model.initialize import initialize
from shardwise.optim.build import build_optimizer
from shardwise.parallel.apply import parallelize_decoder
from shardwise.run.clock import Clock
from shardwise.run.step import run_step
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import OptimizerConfig

BANDS = {"fp16": 0.01, "fp16-true": 0.01, "fp8 rowwise": 0.02, "fp8 tensorwise": 0.02}
SMALL = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128}
LARGE = {"num_layers": 4, "hidden": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "ffn": 14336}
FORMATS = {
    "cpu": ["bf16", "fp32", "fp16", "fp16-true"],
    "cuda": ["bf16", "fp16", "fp8 rowwise", "fp8 tensorwise"],
}


def text() -> torch.Tensor:
    """Bytes of some of the standard library's files, as tokens."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8).long()


def batches(tokens: torch.Tensor, steps: int, rows: int, length: int) -> list[TensorBatch]:
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(0, len(tokens) - length - 1, (steps, rows), generator=draw)
    cut = [torch.stack([tokens[start : start + length + 1] for start in step]) for step in starts.tolist()]
    return [TensorBatch(piece[:, :-1], piece[:, 1:], None) for piece in cut]


def train(spec: ModelSpec, name: str, steps: list[TensorBatch], device: torch.device, lr: float) -> dict[str, Any]:
    precision, _, recipe = name.partition(" ")
    rows, length = steps[0].tokens.shape
    plan = Plan(
        device=device.type,
        precision=precision,
        seq_len=length,
        global_batch=rows,
        micro_batch=rows,
        num_steps=len(steps),
        threads_per_rank=1,
        reason="a benchmark",
        fp8_recipe=recipe or "rowwise",
    )
    if device.type == "cuda":
        gc.collect()  # engines hold themselves in circles
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = parallelize_decoder(spec, plan, 0, device, "auto", lambda model: initialize(model, 0))
    optimizer = build_optimizer(OptimizerConfig(lr=lr), engine.locals())
    clock, losses, seconds, skipped = Clock(device), [], [], 0
    for number, batch in enumerate(steps, 1):
        began = time.perf_counter()
        rate = lr * min(1.0, number / 10)
        step = StepBatch(number, [batch], batch.targets.numel())
        result = run_step(engine, optimizer, step, num_targets=batch.targets.numel(), lr=rate, clip=1.0, clock=clock)
        losses.append(result.loss)
        skipped += result.skipped
        seconds.append(time.perf_counter() - began)
    last = max(1, len(losses) // 10)
    return {
        "format": name,
        "losses": losses,
        "last_loss": statistics.mean(losses[-last:]),
        "step_s": statistics.median(seconds[3:] or seconds),
        "peak_bytes": torch.cuda.max_memory_allocated() if device.type == "cuda" else None,
        "skipped": skipped,
        "scale": engine.scaler.scale,
        "fp8": str(engine.float8) if engine.float8 else None,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true")
    parser.add_argument("--steps", type=int, help="default: 60 on a CPU, 100 on a GPU")
    parser.add_argument("--json", type=Path, help="write what was measured")
    options = parser.parse_args()
    device = torch.device("cuda" if options.cuda else "cpu")
    spec = preset("tiny").with_overrides(LARGE if options.cuda else SMALL)
    num_steps = options.steps or (100 if options.cuda else 60)
    steps = batches(text(), num_steps, *((8, 1024) if options.cuda else (8, 64)))
    found = [train(spec, name, steps, device, 3e-4 if options.cuda else 3e-3) for name in FORMATS[device.type]]
    truth = found[0]
    print(
        f"{'format':<16}{'last loss':>10}{'from bf16':>11}{'band':>8}"
        f"{'step':>11}{'of bf16':>9}{'peak':>11}{'skipped':>9}"
    )
    within = True
    for row in found:
        off, band = row["last_loss"] / truth["last_loss"] - 1, BANDS.get(row["format"])
        row |= {"from_bf16": off, "band": band}
        within &= band is None or abs(off) <= band
        peak = f"{row['peak_bytes'] / 2**30:.2f} GiB" if row["peak_bytes"] else "-"
        bound = f"{100 * band:.0f} %" if band else "-"
        print(
            f"{row['format']:<16}{row['last_loss']:>10.4f}{100 * off:>9.2f} %{bound:>8}{1e3 * row['step_s']:>8.1f} ms"
            f"{row['step_s'] / truth['step_s']:>9.2f}{peak:>11}{row['skipped']:>9}"
        )
        if row["fp8"]:
            print(f"    {row['fp8']}")
    about = {
        "device": torch.cuda.get_device_name() if options.cuda else "cpu",
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "parameters": spec.num_parameters,
        "within_bands": within,
    }
    print(
        f"{'within' if within else 'NOT within'} the bands; {about['device']}, torch {about['torch']}, {about['date']}"
    )
    if options.json:
        options.json.write_text(json.dumps({**about, "formats": found}, indent=1) + "\n")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
