"""Which of cuBLASLt's kernels is fastest for each matmul of a training step, and by how much it beats the one torch
gets.

    python benchmarks/gpu/matmuls.py --json FILE [--shapes 1.5b 8b-wide] [--most 12] [--seconds 0.15]

torch takes the library's first proposal for a shape. Here every proposal is timed, all of one matmul taking turns (a
card at its power limit slows down for everyone alike), with numbers as training has them: normal, not zeros, which
would save power. Input gradients are also tried with the weight kept transposed. The result says what choosing by
measurement could gain, in milliseconds of a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.shapes import SHAPES
from torch import Tensor

from shardwise.kernels.cublas import proposals

Launch = Callable[[], None]


@dataclass(frozen=True)
class Matmul:
    """out = a b. Either factor may be a transposed view."""

    a: Tensor
    b: Tensor
    out: Tensor

    def as_torch(self) -> None:
        torch.mm(self.a, self.b, out=self.out)

    def proposals(self, most: int) -> list[Launch]:
        return [partial(launch, self.a, self.b, self.out, 0.0) for launch in proposals(self.a, self.b, self.out, most)]


def kernel_name(launch: Launch) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launch()
        torch.cuda.synchronize()
    names = [
        event.name
        for event in profile.events()
        if "nvjet" in event.name or "gemm" in event.name or "cutlass" in event.name
    ]
    return names[0] if names else "?"


def timed(launches: list[Launch], rounds: int, seconds: float) -> list[float]:
    """Median ms of each, taking turns of so many seconds. Short turns find all at one clock; long ones each at the
    clock that its own power leaves."""
    repeats = max(6, round(1e3 * seconds / timed(launches[:1], 1, 0.0)[0])) if seconds else 6
    times: list[list[float]] = [[] for _ in launches]
    for _ in range(rounds):
        for launch, found in zip(launches, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            launch()  # the one before has left the caches
            start.record()
            for _ in range(repeats):
                launch()
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / repeats)
    return [statistics.median(found) for found in times]


def matmuls_of(rows: int, out: int, width: int) -> dict[str, Matmul]:
    """The three matmuls of y = x W', W (out, width), and input gradients with the weight kept transposed."""
    draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02  # noqa: E731
    x, w, dy = draw(rows, width), draw(out, width), draw(rows, out)
    transposed = w.t().contiguous()
    return {
        "forward": Matmul(x, w.t(), torch.empty(rows, out, device="cuda", dtype=torch.bfloat16)),
        "input gradient": Matmul(dy, w, torch.empty_like(x)),
        "input gradient, weight kept transposed": Matmul(dy, transposed.t(), torch.empty_like(x)),
        "weight gradient": Matmul(dy.t(), x, torch.empty_like(w)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["1.5b", "8b-wide"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--most", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0, help="of each turn; by default six matmuls")
    asked = parser.parse_args()
    found: dict[str, dict] = {}
    for name in asked.shapes:
        spec = SHAPES[name].spec
        heads, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        layers = spec.num_layers
        matrices = {
            "q and o": (asked.tokens, heads, spec.hidden, 2 * layers),
            "k and v": (asked.tokens, kv, spec.hidden, 2 * layers),
            "gate and up": (asked.tokens, spec.ffn, spec.hidden, 2 * layers),
            "down": (asked.tokens, spec.hidden, spec.ffn, layers),
            "head": (4096, spec.vocab, spec.hidden, asked.tokens // 4096),
        }
        now = best = 0.0
        for matrix, (rows, out, width, count) in matrices.items():
            for kind, matmul in matmuls_of(rows, out, width).items():
                candidates = matmul.proposals(asked.most)
                torch_ms, *others = timed([matmul.as_torch, *candidates], asked.rounds, asked.seconds)
                order = sorted(range(len(others)), key=others.__getitem__)
                flops = 2 * rows * out * width
                row = {
                    "count": count,
                    "torch_ms": torch_ms,
                    "torch_tflops": flops / torch_ms / 1e9,
                    "proposals_ms": others,
                    "best_ms": others[order[0]],
                    "best": kernel_name(candidates[order[0]]),
                    "first": kernel_name(candidates[0]),
                }
                found[f"{name} {matrix}, {kind}"] = row
                if "kept" not in kind:
                    now += count * torch_ms
                    best += count * min(torch_ms, row["best_ms"])
                print(
                    f"{name} {matrix}, {kind}: torch {torch_ms:.3f} ms ({row['torch_tflops']:.0f} TFLOP/s), first "
                    f"{others[0]:.3f}, "
                    f"best {row['best_ms']:.3f} (no. {order[0]}) {row['first']} -> {row['best']}",
                    flush=True,
                )
                asked.json.write_text(json.dumps(found, indent=1) + "\n")
            torch.cuda.empty_cache()
        print(f"{name}: matmuls of a step {now:.1f} ms as torch chooses, {best:.1f} ms at best", flush=True)


if __name__ == "__main__":
    main()
