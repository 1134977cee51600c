"""Which of cuBLASLt's kernels is fastest for each product of a training step, and by how much it beats the one torch gets.

    python benchmarks/gpu/products.py --json FILE [--shapes 1.5b 8b-wide] [--most 12]

torch takes the library's first proposal for a shape. Here every proposal is timed, all of one product taking turns (a card at its power limit slows
down for everyone alike), with numbers as training has them: normal, not zeros, which would save power. Input gradients are also tried with the weight kept
transposed. The result says what choosing by measurement could gain, in milliseconds of a step.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from gpu.shapes import SHAPES
from torch import Tensor

BF16, FP32, COMPUTE_FP32, TRANSPOSE_A, TRANSPOSE_B, WORKSPACE = 14, 0, 68, 3, 4, 1  # cublasLt.h's numbers
WORKSPACE_BYTES = 64 * 2**20


class Proposal(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


def checked(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt answered {status}")


@dataclass
class Product:
    """out (rows, columns) = a @ b. Both in row-major memory, either may be a transposed view."""

    a: Tensor
    b: Tensor
    out: Tensor

    def proposals(self, library: ctypes.CDLL, handle: ctypes.c_void_p, most: int) -> list[Callable[[], None]]:
        """Row-major out = a b is column-major out' = b' a': the library's A is b."""
        operation, preference = ctypes.c_void_p(), ctypes.c_void_p()
        checked(library.cublasLtMatmulDescCreate(ctypes.byref(operation), COMPUTE_FP32, FP32))
        layouts = []
        for attribute, matrix in ((TRANSPOSE_A, self.b), (TRANSPOSE_B, self.a), (None, self.out)):
            turned = not matrix.is_contiguous()
            memory = matrix.t() if turned else matrix
            assert memory.is_contiguous()
            layout = ctypes.c_void_p()
            rows, columns = memory.shape
            checked(
                library.cublasLtMatrixLayoutCreate(
                    ctypes.byref(layout), BF16, ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(columns)
                )
            )
            layouts.append(layout)
            if attribute is not None:
                flag = ctypes.c_int(int(turned))
                checked(library.cublasLtMatmulDescSetAttribute(operation, attribute, ctypes.byref(flag), 4))
        checked(library.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
        room = ctypes.c_uint64(WORKSPACE_BYTES)
        checked(library.cublasLtMatmulPreferenceSetAttribute(preference, WORKSPACE, ctypes.byref(room), 8))
        found, count = (Proposal * most)(), ctypes.c_int()
        a, b, out = layouts[0], layouts[1], layouts[2]
        checked(
            library.cublasLtMatmulAlgoGetHeuristic(
                handle, operation, a, b, out, out, preference, most, found, ctypes.byref(count)
            )
        )
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")

        def run(proposal: Proposal) -> Callable[[], None]:
            def launch() -> None:
                checked(
                    library.cublasLtMatmul(
                        handle, operation, ctypes.byref(one), ctypes.c_void_p(self.b.data_ptr()), a,
                        ctypes.c_void_p(self.a.data_ptr()), b, ctypes.byref(zero), ctypes.c_void_p(self.out.data_ptr()), out,
                        ctypes.c_void_p(self.out.data_ptr()), out, ctypes.byref(proposal), ctypes.c_void_p(workspace.data_ptr()),
                        ctypes.c_size_t(WORKSPACE_BYTES), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream),
                    )
                )  # fmt: skip

            return launch

        return [run(found[i]) for i in range(count.value) if found[i].state == 0]


def kernel_name(launch: Callable[[], None]) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        launch()
        torch.cuda.synchronize()
    names = [
        event.name
        for event in profile.events()
        if "nvjet" in event.name or "gemm" in event.name or "cutlass" in event.name
    ]
    return names[0] if names else "?"


def timed(launches: list[Callable[[], None]], rounds: int, repeats: int) -> list[float]:
    """Median ms of each, taking turns."""
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


def products_of(rows: int, out: int, width: int) -> dict[str, Product]:
    """The three products of y = x W', W (out, width), and input gradients with the weight kept transposed."""
    draw = lambda *shape: torch.randn(shape, device="cuda", dtype=torch.bfloat16) * 0.02  # noqa: E731
    x, w, dy = draw(rows, width), draw(out, width), draw(rows, out)
    turned = w.t().contiguous()
    return {
        "forward": Product(x, w.t(), torch.empty(rows, out, device="cuda", dtype=torch.bfloat16)),
        "input gradient": Product(dy, w, torch.empty_like(x)),
        "input gradient, weight kept transposed": Product(dy, turned.t(), torch.empty_like(x)),
        "weight gradient": Product(dy.t(), x, torch.empty_like(w)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", default=["1.5b", "8b-wide"])
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--most", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    library = ctypes.CDLL("libcublasLt.so.13" if (torch.version.cuda or "").startswith("13") else "libcublasLt.so.12")
    handle = ctypes.c_void_p()
    torch.zeros(1, device="cuda")
    checked(library.cublasLtCreate(ctypes.byref(handle)))
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
            for kind, product in products_of(rows, out, width).items():
                candidates = product.proposals(library, handle, asked.most)
                torch_ms, *others = timed(
                    [lambda p=product: torch.mm(p.a, p.b, out=p.out), *candidates], asked.rounds, 6
                )
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
                    f"{name} {matrix}, {kind}: torch {torch_ms:.3f} ms ({row['torch_tflops']:.0f} TFLOP/s), first {others[0]:.3f}, "
                    f"best {row['best_ms']:.3f} (no. {order[0]}) {row['first']} -> {row['best']}",
                    flush=True,
                )
                asked.json.write_text(json.dumps(found, indent=1) + "\n")
            torch.cuda.empty_cache()
        print(f"{name}: products of a step {now:.1f} ms as torch chooses, {best:.1f} ms at best", flush=True)


if __name__ == "__main__":
    main()
