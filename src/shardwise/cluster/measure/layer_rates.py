"""This is the child process behind layers.py: it measures what the operations of a layer reach on one device, by size.

    python -m shardwise.cluster.measure.layer_rates DEVICE [MEASUREMENT or number format to skip ...]

Waits for a line before it measures, so that all devices, or all cores, are busy at once. One JSON line per event
(ready, start, done), so that the parent knows which measurement ended the process.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from shardwise.cluster.measure.timer import host_clock, lower_quartile, seconds_of

FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Tokens, inputs, outputs.
MATMULS = {
    "cpu": ((64, 64, 64), (256, 128, 128), (256, 256, 512), (512, 384, 1024), (1024, 512, 1536), (1024, 1024, 2048)),
    "cuda": (
        (256, 256, 256),
        (1024, 512, 512),
        (1024, 768, 3072),
        (2048, 2048, 2048),
        (4096, 2048, 8192),
        (8192, 4096, 4096),
        (8192, 4096, 14336),
        (16384, 8192, 8192),
    ),
}
# Rows, query heads, key-value heads, tokens, width of a head.
ATTENTIONS = {
    "cpu": ((2, 4, 4, 64, 32), (1, 4, 4, 256, 64), (1, 8, 8, 1024, 64)),
    "cuda": ((4, 8, 8, 256, 64), (2, 16, 16, 1024, 64), (2, 32, 8, 2048, 128), (1, 32, 8, 8192, 128)),
}
ELEMENTS = {"cpu": (2**12, 2**15, 2**18, 2**22), "cuda": (2**16, 2**20, 2**24, 2**28)}  # in a pass over memory

Measurement = Callable[[], tuple[float, float]]  # size, rate


def main(name: str, skipped: set[str]) -> None:
    device = torch.device(name)
    if device.type == "cpu":
        torch.set_num_threads(1)
    _say(event="ready")
    sys.stdin.readline()
    for label, measurement in _measurements(device):
        if label in skipped or label.partition("#")[0].partition("/")[2] in skipped:
            continue
        _say(event="start", measurement=label)
        size, value = measurement()
        _say(event="done", measurement=label, size=size, value=value)


def _measurements(device: torch.device) -> Iterator[tuple[str, Measurement]]:
    yield "launch#0", partial(_launch, device)
    for number, count in enumerate(ELEMENTS[device.type]):
        yield f"elementwise#{number}", partial(_passes, device, count)
    for name, dtype in FORMATS.items():
        for number, shape in enumerate(MATMULS[device.type]):
            yield f"matmul/{name}#{number}", partial(_matmuls, device, dtype, *shape)
        for number, heads in enumerate(ATTENTIONS[device.type]):
            yield f"attention/{name}#{number}", partial(_attention, device, dtype, False, *heads)
            yield f"attention-backward/{name}#{number}", partial(_attention, device, dtype, True, *heads)


def _matmuls(device: torch.device, dtype: torch.dtype, tokens: int, inputs: int, outputs: int) -> tuple[float, float]:
    """Returns the FLOP of one matmul and its FLOP/s, the mean of the three that a layer does: forward, and for the
    gradients of input and weight."""
    x_TI = torch.randn(tokens, inputs, device=device, dtype=dtype)
    w_OI = torch.randn(outputs, inputs, device=device, dtype=dtype)
    g_TO = torch.randn(tokens, outputs, device=device, dtype=dtype)
    seconds = seconds_of(lambda: (x_TI @ w_OI.T, g_TO @ w_OI, g_TO.T @ x_TI), device)
    flops = 2 * tokens * inputs * outputs
    return flops, 3 * flops / seconds


def _attention(
    device: torch.device,
    dtype: torch.dtype,
    backward: bool,
    rows: int,
    heads: int,
    kv_heads: int,
    tokens: int,
    width: int,
) -> tuple[float, float]:
    """Returns the FLOP of causal attention and its FLOP/s: half of both matmuls is computed, and in backward two and a
    half times as much."""
    q, k, v = (
        torch.randn(rows, count, tokens, width, device=device, dtype=dtype, requires_grad=True)
        for count in (heads, kv_heads, kv_heads)
    )
    if dtype == torch.float32 and kv_heads != heads:  # as attention in models does it: no fp32 kernel has grouped heads
        k, v = (tensor.repeat_interleave(heads // kv_heads, 1) for tensor in (k, v))
    flops = 2.0 * rows * heads * tokens * tokens * width
    attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=k.shape[1] != heads)
    if not backward:
        return flops, flops / seconds_of(attend, device)
    out = attend()
    grad = torch.randn_like(out)
    seconds = seconds_of(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True), device)
    return 2.5 * flops, 2.5 * flops / seconds


def _passes(device: torch.device, count: int) -> tuple[float, float]:
    """Returns the bytes of one pass over memory and its bytes per second, the mean of those around a block's matmuls:
    an addition, a norm, a gate."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    width = min(count, 1024)
    x, y = (torch.randn(count // width, width, device=device, dtype=dtype) for _ in range(2))
    w = torch.ones(width, device=device, dtype=dtype)
    moved = (3 + 2 + 2 + 3) * x.nbytes
    seconds = seconds_of(lambda: (x + y, F.rms_norm(x, (width,), w), F.silu(x), x * y), device)
    return moved / 4, moved / seconds


def _launch(device: torch.device) -> tuple[float, float]:
    """Returns 1 and the host's seconds per operation inside a model. A block so small that nothing else counts runs
    forward and backward, and its time is divided by its operations."""
    model = nn.Sequential(*(_Block() for _ in range(BLOCKS))).to(device)
    x_BTD = torch.randn(1, 8, WIDTH, device=device, requires_grad=True)
    # On a GPU backward runs in a thread of its own.
    now, times = time.perf_counter if device.type == "cuda" else host_clock(), []
    for _ in range(25):
        start = now()
        model(x_BTD).sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((now() - start) / BLOCKS / OPERATIONS)
        model.zero_grad()
    return 1.0, lower_quartile(times)


BLOCKS, WIDTH = 6, 32
OPERATIONS = 90  # in one block forward and backward, views included, as plan/prediction/operations.py counts


class _Block(nn.Module):
    """Does the operations of a decoder's block."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.o, self.gate, self.up, self.down = (
            nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(7)
        )

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        h_BTD = self.norms[0](x_BTD)
        q, k, v = (layer(h_BTD).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (t * 0.5 + torch.cat((-t[..., 8:], t[..., :8]), -1) * 0.5 for t in (q, k))
        out_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x_BTD = x_BTD + self.o(out_BTD)
        h_BTD = self.norms[1](x_BTD)
        return x_BTD + self.down(F.silu(self.gate(h_BTD)) * self.up(h_BTD))


def _say(**event: object) -> None:
    print(json.dumps(event), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], set(sys.argv[2:]))
