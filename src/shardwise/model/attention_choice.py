"""Which attention kernel is fastest here, for these shapes: measured, once, before a run on a GPU.

Owns the candidates and their stop-watch. What a kernel takes depends on the GPU, the versions of torch and cuDNN, the head's width and the length of sequences, so no table is
kept. A candidate that cannot run this shape drops out. Read next: attention.py, which has the kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardwise.model.attention import attend
from shardwise.model.masking import MaskBuilder
from shardwise.model.rope import softmax_scale
from shardwise.model.spec import LayerSpec, ModelSpec

MOST_TOKENS = 16384  # of a measurement: the order of kernels does not change beyond, their time does
REPEATS = 5
PLAIN, MASKED, CAPPED = ("cudnn", "flash"), ("flex", "sdpa"), ("flex", "math")


@dataclass(frozen=True)
class Shape:
    rows: int
    seq_len: int
    tp: int = 1


@dataclass(frozen=True)
class Choice:
    kernel: str
    seconds: dict[str, float]  # of forward and backward by kernel that runs here
    shape: Shape

    def __str__(self) -> str:
        if not self.seconds:
            return f"attention {self.kernel}"
        order = sorted(self.seconds, key=self.seconds.__getitem__)
        times = ", ".join(f"{kernel} {1e3 * self.seconds[kernel]:.2f}" for kernel in order)
        return f"attention {self.kernel}, the fastest for {self.shape.rows} x {self.shape.seq_len:,} tokens (ms per layer: {times})"


def candidates(spec: ModelSpec, layer: LayerSpec, seq_len: int) -> tuple[str, ...]:
    if spec.attention_softcap:
        return CAPPED
    return MASKED if layer.window is not None and layer.window < seq_len else PLAIN


def choose(
    spec: ModelSpec,
    layers: Sequence[LayerSpec],
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    among: tuple[str, ...] = (),
) -> dict[int, Choice]:
    """By layer index; layers that see as much share a measurement. `among`: instead of the usual candidates."""
    length = min(shape.seq_len, MOST_TOKENS)
    short = Shape(max(1, min(shape.rows, MOST_TOKENS // length)), length, shape.tp)
    found: dict[tuple[tuple[str, ...], int | None], Choice] = {}
    result = {}
    for layer in layers:
        kernels = among or candidates(spec, layer, shape.seq_len)
        key = (kernels, layer.window)
        if key not in found:
            times = {kernel: _seconds(spec, layer, kernel, short, dtype, device) for kernel in kernels}
            ran = {kernel: seconds for kernel, seconds in times.items() if seconds is not None}
            found[key] = Choice(min(ran, key=ran.__getitem__) if ran else _fallback(spec), ran, short)
        result[layer.index] = found[key]
    return result


def _fallback(spec: ModelSpec) -> str:
    return "math" if spec.attention_softcap else "sdpa"


def _seconds(
    spec: ModelSpec, layer: LayerSpec, kernel: str, shape: Shape, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Forward and backward once, the median of a few; None where the kernel does not take this."""
    if kernel == "flex" and device.type != "cuda":
        return None
    heads, kv_heads = max(1, spec.num_heads // shape.tp), max(1, spec.num_kv_heads // shape.tp)
    width = spec.head_dim
    if spec.is_latent:  # values are padded to the width of queries
        width, kv_heads = spec.qk_nope_head_dim + spec.qk_rope_head_dim, heads
    q, k, v = (
        torch.randn(shape.rows, shape.seq_len, num, width, device=device, dtype=dtype, requires_grad=True)
        for num in (heads, kv_heads, kv_heads)
    )
    builder = MaskBuilder(shape.seq_len, 0, device)
    mask = builder.build((layer,), flex=kernel == "flex")[builder.key(layer)]

    def once() -> float:
        began = _now(device)
        y = attend(q, k, v, mask, kernel, softmax_scale(spec), spec.attention_softcap)
        torch.autograd.grad(y, (q, k, v), y)
        return _now(device) - began

    try:
        once()
        return statistics.median(once() for _ in range(REPEATS))
    except RuntimeError:  # a kernel that refuses says so in many words; torch.OutOfMemoryError is one too
        return None


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
