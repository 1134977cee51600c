"""What low-bit training costs in loss: QLoRA beside LoRA, 8-bit states beside AdamW.

    python benchmarks/fine_tune.py [--base RUN] [--steps 100] [--json FILE]

The default run is trained (or --base RUN taken) and exported; then each kind goes on from its weights on files it has
not seen, the sources of torch.nn, with the same rows and seed. Target: each low-bit kind's held-out loss is at most 2 %
above the other's.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).resolve().parent.parent / "src"
TARGET = 1.02
ADAPTED = ["adapter.targets=all-linear", "optimizer.lr=1e-3"]
KINDS = {
    "lora": ["adapter.kind=lora", *ADAPTED],
    "qlora": ["adapter.kind=qlora", *ADAPTED],
    "adamw": ["optimizer.name=adamw", "optimizer.lr=3e-4"],
    "adamw8bit": ["optimizer.name=adamw8bit", "optimizer.lr=3e-4"],
}


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


def compare(options: argparse.Namespace) -> dict[str, Any]:
    files = Path(torch.__file__).parent / "nn" / "modules"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = options.base
        if base is None:
            shardwise(folder, "train", "run.name=base", f"train.steps={options.base_steps}")
            base = "runs/base"
        shardwise(folder, "export", str(base), "--out", "base-hf")
        found: dict[str, Any] = {}
        for kind, words in KINDS.items():
            common = [
                f"data.source={files}",
                "model.path=base-hf",
                "data.tokenizer=bytes",
                "data.validation_fraction=0.1",
            ]
            shardwise(
                folder, "train", *common, *words, f"train.steps={options.steps}", f"run.name={kind}", "--no-verify"
            )
            found[kind] = losses(folder / "runs" / kind)
            print(f"{kind:<10} {found[kind]}", flush=True)
    for low, high in (("qlora", "lora"), ("adamw8bit", "adamw")):
        ratio = found[low]["held_out"] / found[high]["held_out"]
        found[f"{low} over {high}"] = {"ratio": ratio, "target": TARGET, "holds": ratio <= TARGET}
        print(f"{low} over {high}: held-out loss {ratio:.4f}, target {TARGET}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="a finished default run instead of a new one")
    parser.add_argument("--base-steps", type=int, default=340, help="as the default run")
    parser.add_argument("--steps", type=int, default=100, help="of each fine-tuning")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "fine_tune.json")
    options = parser.parse_args()
    options.base = options.base.resolve() if options.base else None
    found = compare(options)
    found |= {"torch": torch.__version__, "python": platform.python_version(), "date": time.strftime("%Y-%m-%d")}
    options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
