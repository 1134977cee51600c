"""Adapters: what four bits cost in loss, and the largest QLoRA step that one GPU holds.

    python benchmarks/adapters.py             LoRA and QLoRA from the default run's own checkpoint, on files it has not seen
    python benchmarks/adapters.py --cuda      a step of llama3-70b's shape on one GPU: peak memory and time

On a CPU: the default run is trained (or --base RUN taken) and exported; then both kinds train its linear layers on the sources of torch.nn,
with the same rows, seed and learning rate. Bar: QLoRA's held-out loss is at most 2 % above LoRA's.
On a GPU: weights are random bits, drawn on the device, because rounding 70 B drawn numbers would take far longer than the step; what is
measured (memory, time) does not depend on them. Blocks are computed again in backward. Bar: peak within 5 % of the prediction.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
from torch.utils.checkpoint import checkpoint

from shardwise.config.schema import AdapterConfig, OptimizerConfig
from shardwise.model.adapters import adapt, decoder_adapters
from shardwise.model.decoder import Decoder
from shardwise.model.nf4 import CHUNK
from shardwise.model.presets import preset
from shardwise.plan.activations import head_activation_bytes, layer_activations
from shardwise.plan.plan import Plan
from shardwise.plan.predict import predict_memory
from shardwise.run.optimizer import build_optimizer

SOURCE = Path(__file__).resolve().parent.parent / "src"
RESULTS = Path(__file__).parent / "results"
BAR_LOSS, BAR_PEAK = 1.02, 0.05
GIB = 2**30


# On a CPU -------------------------------------------------------------------------------------------------------------


def shardwise(folder: Path, *words: str) -> None:
    command = [sys.executable, "-m", "shardwise", *words]
    environment = {"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", "HOME": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def losses(run: Path) -> dict[str, Any]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [line["loss"] for line in lines if "step_s" in line]
    times = sorted(line["step_s"] for line in lines if "step_s" in line)
    held_out = [line["eval_loss"] for line in lines if "eval_loss" in line]
    return {"first": steps[0], "last_tenth": sum(steps[-len(steps) // 10 :]) / len(steps[-len(steps) // 10 :]),
            "held_out": held_out[-1], "step_s": times[len(times) // 2]}  # fmt: skip


def on_cpu(options: argparse.Namespace) -> dict[str, Any]:
    files = Path(torch.__file__).parent / "nn" / "modules"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = options.base
        if base is None:
            shardwise(folder, "train", "run.name=base", f"train.steps={options.base_steps}")
            base = "runs/base"
        shardwise(folder, "export", str(base), "--out", "base-hf")
        found: dict[str, Any] = {}
        for kind in ("lora", "qlora"):
            words = [f"adapter.kind={kind}", "adapter.targets=all-linear", f"data.source={files}", "model.path=base-hf"]
            words += ["data.tokenizer=bytes", "data.validation_fraction=0.1", "optimizer.lr=1e-3"]
            shardwise(folder, "train", *words, f"train.steps={options.steps}", f"run.name={kind}", "--no-verify")
            found[kind] = losses(folder / "runs" / kind)
    ratio = found["qlora"]["held_out"] / found["lora"]["held_out"]
    return {**found, "qlora_over_lora": ratio, "bar": BAR_LOSS, "holds": ratio <= BAR_LOSS}


# On one GPU -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def draw_bits(model: Decoder) -> None:
    """Random codes, magnitudes around 0.05: matrices as wide as real ones, without a detour through numbers of 16 bits."""
    for name, parameter in model.named_parameters():
        leaf = name.rsplit(".", 1)[1]
        if leaf in ("weight_nf4", "weight_absmax"):
            parameter.view(torch.int16).random_(-(2**15), 2**15)
        elif leaf == "weight_scale":
            parameter.view(torch.float32).copy_(torch.tensor([0.01, 0.05], device=parameter.device))
        elif parameter.ndim == 1:
            parameter.fill_(1.0)
        elif leaf == "lora_b":
            parameter.zero_()
        else:
            parameter.normal_(0.0, 0.02)


def on_gpu(options: argparse.Namespace) -> dict[str, Any]:
    device, spec = torch.device("cuda"), preset(options.model)
    if options.layers:
        spec = spec.with_overrides({"num_layers": options.layers})
    adapter = AdapterConfig(kind="qlora", rank=16, targets=("all-linear",))
    began = time.perf_counter()
    with torch.device("meta"):
        model = Decoder(spec).to(torch.bfloat16)
    adapt(model, decoder_adapters(spec, adapter, 0, "bf16-true"))
    draw_bits(model.to_empty(device=device))
    for block in model.layers.values():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    optimizer = build_optimizer(OptimizerConfig(lr=1e-4), model.parameters())
    built_s, held = time.perf_counter() - began, torch.cuda.memory_allocated()
    tokens_BT = torch.randint(0, spec.vocab, (options.micro_batch, options.tokens), device=device)
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(options.rounds):
        torch.cuda.synchronize()
        began = time.perf_counter()
        (model(tokens_BT, tokens_BT).cross_entropy / tokens_BT.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    peak, (total, parts) = torch.cuda.max_memory_allocated(), predicted(options, spec, adapter)
    return {
        "device": torch.cuda.get_device_name(0),
        "model": spec.name,
        "layers": spec.num_layers,
        "parameters": spec.num_parameters,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "tokens": tokens_BT.numel(),
        "built_s": built_s,
        "step_s": min(seconds),
        "weights_gib": held / GIB,
        "peak_gib": peak / GIB,
        "predicted_gib": total / GIB,
        "predicted_parts_gib": {name: size / GIB for name, size in parts.items()},
        "peak_over_predicted": peak / total,
        "holds": abs(peak / total - 1) <= BAR_PEAK,
    }


def predicted(options: argparse.Namespace, spec: Any, adapter: AdapterConfig) -> tuple[int, dict[str, int]]:
    plan = Plan("cuda", "bf16-true", options.tokens, options.micro_batch, options.micro_batch, 1, 1, "benchmark")
    parts = predict_memory(spec, plan, "adamw", adapter)
    tokens = options.micro_batch * options.tokens
    held = {name: parts[name] for name in ("weights", "gathered", "gradients", "optimizer")}
    # Each block's input, what one block keeps while it goes backward, the end of the model, and one chunk being read in fp32.
    held["inputs of blocks"] = spec.num_layers * tokens * spec.hidden * 2
    held["one block"] = tokens * layer_activations(spec, spec.layers[:1], options.tokens) * 2
    held["head"] = head_activation_bytes(spec, tokens, 2)
    held["reading"] = CHUNK * 4 * 2
    # Backward begins at the head and ends at the blocks: the larger of the two lives beside the rest.
    smaller = min(("one block", "head"), key=lambda name: held[name])
    return sum(size for name, size in held.items() if name != smaller), held


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="a step of a large model on one GPU")
    parser.add_argument("--json", type=Path, default=None, help="where the result goes")
    parser.add_argument("--base", type=Path, default=None, help="a finished default run instead of a new one")
    parser.add_argument("--base-steps", type=int, default=340, help="as the default run")
    parser.add_argument("--steps", type=int, default=100, help="of each fine-tuning")
    parser.add_argument("--model", default="llama3-70b")
    parser.add_argument("--layers", type=int, default=None, help="fewer layers than the model has")
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    if options.base:
        options.base = options.base.resolve()
    found = on_gpu(options) if options.cuda else on_cpu(options)
    found |= {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    for name, value in found.items():
        print(f"{name:<22} {value}")
    file = options.json or RESULTS / ("adapters_cuda.json" if options.cuda else "adapters.json")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
