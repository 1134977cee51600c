"""What single operations reach on one GPU: matmuls by shape, attention, elementwise passes, the optimizer, the
cost of a launch.

    python benchmarks/gpu/kernels.py [--json FILE]

The planner's constants for this card are checked against these figures (plan/prediction/kernels.py). Medians of CUDA
events.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.optim.build import build_optimizer
from shardwise.spec.schema import OptimizerConfig

TOKENS = (1024, 2048, 4096, 8192, 16384, 32768)
WIDTHS = (
    (768, 3072),
    (2048, 2048),
    (2048, 8192),
    (4096, 4096),
    (4096, 14336),
    (8192, 8192),
    (8192, 28672),
    (2048, 128256),
    (576, 1536),
    (2048, 1024),
)
"""Inputs and outputs of a layer; the second pass has them the other way round."""
ATTENTIONS = (
    (1, 32, 8, 2048, 128), (1, 32, 8, 4096, 128), (4, 32, 8, 4096, 128), (1, 32, 8, 16384, 128), (1, 32, 8, 32768, 128),
    (4, 32, 8, 4096, 64), (8, 32, 8, 2048, 64), (32, 9, 9, 2048, 64), (16, 12, 12, 1024, 64), (2, 64, 8, 8192, 128),
)  # fmt: skip
"""Batch, heads, key-value heads, tokens, width of a head."""


def seconds(action: Callable[[], object], repeats: int = 12) -> float:
    for _ in range(3):
        action()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def matmuls() -> list[dict[str, Any]]:
    shapes = [(tokens, *widths) for tokens in TOKENS for widths in WIDTHS if tokens * widths[1] <= 2**31]
    return [found for shape in shapes for found in layer_matmuls(*shape)]


def layer_matmuls(tokens: int, inputs: int, outputs: int) -> list[dict[str, Any]]:
    x = torch.randn(tokens, inputs, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
    g = torch.randn(tokens, outputs, device="cuda", dtype=torch.bfloat16)
    found = []
    for name, action, (m, n, k) in (
        ("forward", lambda: x @ w.T, (tokens, outputs, inputs)),
        ("input", lambda: g @ w, (tokens, inputs, outputs)),
        ("weight", lambda: g.T @ x, (outputs, inputs, tokens)),
    ):
        took = seconds(action)
        found.append({"pass": name, "m": m, "n": n, "k": k, "seconds": took, "tflops": 2 * m * n * k / took / 1e12})
    return found


def attention() -> list[dict[str, Any]]:
    kernels = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
    return [one_attention(kernel, *shape) for shape in ATTENTIONS for kernel in kernels]


def one_attention(kernel: SDPBackend, batch: int, heads: int, kv_heads: int, tokens: int, width: int) -> dict[str, Any]:
    def leaf(count: int) -> torch.Tensor:
        return torch.randn(batch, count, tokens, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    q, k, v = leaf(heads), leaf(kv_heads), leaf(kv_heads)

    def run() -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    about = {
        "kernel": kernel.name,
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "tokens": tokens,
        "width": width,
    }
    try:
        with sdpa_kernel(kernel):
            forward = seconds(run)
            out = run()
            grad = torch.randn_like(out)
            backward = seconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    except RuntimeError as error:
        return about | {"error": str(error)[:80]}
    work = 2 * batch * heads * tokens * tokens * width  # causal: half of both matmuls
    rates = {"forward_tflops": work / forward / 1e12, "backward_tflops": 2.5 * work / backward / 1e12}
    return about | {"forward_s": forward, "backward_s": backward, **rates}


def passes() -> list[dict[str, Any]]:
    """Bytes read and written per second by what is not a matmul."""
    shapes = ((4096, 2048), (16384, 2048), (16384, 8192), (32768, 14336))
    return [found for shape in shapes for found in passes_over(*shape)]


def passes_over(rows: int, width: int) -> list[dict[str, Any]]:
    x, y = (torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    w, f, size = torch.ones(width, device="cuda", dtype=torch.bfloat16), x.float(), x.nbytes
    found = []
    for name, action, moved in (
        ("copy", lambda: x.clone(), 2 * size),
        ("add", lambda: x + y, 3 * size),
        ("silu", lambda: functional.silu(x), 2 * size),
        ("multiply", lambda: x * y, 3 * size),
        ("rms_norm", lambda: functional.rms_norm(x, (width,), w), 2 * size),
        ("layer_norm", lambda: functional.layer_norm(x, (width,), w, w), 2 * size),
        ("cast", lambda: x.float(), 3 * size),
        ("log_softmax", lambda: functional.log_softmax(f, -1), 4 * size),
    ):
        took = seconds(action)
        about = {"name": name, "rows": rows, "width": width, "bytes": moved}
        found.append(about | {"seconds": took, "gbytes_per_s": moved / took / 1e9})
    return found


def update() -> list[dict[str, Any]]:
    return [found for shape in ((16, 2**22), (100, 2**22), (100, 2**24)) for found in update_of(*shape)]


def update_of(count: int, size: int) -> list[dict[str, Any]]:
    """AdamW reads four elements and writes three; the norm reads one."""
    parameters = [torch.nn.Parameter(torch.randn(size, device="cuda")) for _ in range(count)]
    gradients = [torch.randn_like(parameter) for parameter in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    fused = torch.optim.AdamW(parameters, fused=True)
    each = torch.optim.AdamW(parameters, foreach=True)
    found = []
    for name, action, touched in (
        ("fused", fused.step, 7),
        ("foreach", each.step, 7),
        ("norm", lambda: torch.nn.utils.get_total_norm(gradients), 1),
    ):
        took = seconds(action, 6)
        moved = 4 * touched * count * size
        found.append({"name": name, "numbers": count * size, "seconds": took, "gbytes_per_s": moved / took / 1e9})
    return found


def one_pass() -> list[dict[str, Any]]:
    """Our own updates over fp32 master weights and the bf16 ones: 28 bytes per element with AdamW's states in
    fp32, 16 with them in 8 bits."""
    found = []
    for name, state_bytes in (("adamw", 4.0), ("adamw8bit", 1 + 4 / 256)):
        masters = [torch.nn.Parameter(torch.randn(4096, 14336, device="cuda")) for _ in range(16)]
        low_precision_of = {master: torch.nn.Parameter(master.detach().bfloat16()) for master in masters}
        gradients = [0.01 * torch.randn_like(copy) for copy in low_precision_of.values()]
        optimizer = build_optimizer(OptimizerConfig(name=name), masters, low_precision_of)

        def step(
            low_precision_of: Any = low_precision_of, gradients: Any = gradients, optimizer: Any = optimizer
        ) -> None:
            for copy, gradient in zip(low_precision_of.values(), gradients, strict=True):
                copy.grad = gradient
            optimizer.step()

        elements, took = sum(master.numel() for master in masters), seconds(step)
        moved = elements * (2 + 4 + 4 + 2 + 4 * state_bytes)
        found.append({"name": name, "numbers": elements, "seconds": took, "gbytes_per_s": moved / took / 1e9})
    return found


def launches() -> dict[str, float]:
    """Host seconds per operation: many tiny ones, without waiting."""
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def host(action: Callable[[], object], repeats: int = 2000) -> float:
        action()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(repeats):
            action()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / repeats

    return {"multiply": host(lambda: x * x), "matmul": host(lambda: x @ x), "matmul with graph": host(lambda: x @ w),
            "forward and backward": host(lambda: torch.autograd.grad((x @ w).sum(), w), 500),
            "linear": host(lambda: functional.linear(x, w))}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for part in (launches, matmuls, attention, passes, update, one_pass):
        found[part.__name__] = part()
        print(part.__name__, json.dumps(found[part.__name__])[:600], flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
