"""Which attention kernel is fastest here, for these shapes: measured, once, before a run on a GPU.

Owns the candidates and their stop-watch. What a kernel takes depends on the GPU, the versions of torch and cuDNN, the head's width and the length of sequences, so no table is
kept. A candidate that cannot run this shape drops out, and so does one whose results are not the first one's. Read next: attention.py, which has the kernels.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.kernels import flash4
from shardwise.model.attention import attend
from shardwise.model.masking import MaskBuilder
from shardwise.model.rope import softmax_scale
from shardwise.spec.model import LayerSpec, ModelSpec

MOST_TOKENS = 16384  # of a measurement: the order of kernels does not change beyond, their time does
REPEATS = 3
TURN = 6  # runs that wait for nothing between them: in a step the host is ahead, so what it takes to start a kernel does not count
PLAIN, MASKED, CAPPED = ("cudnn", "flash", "flash4"), ("flex", "sdpa"), ("flex", "math")
ALIKE = 0.02  # how far apart results of two kernels in 16 bits may be, by norm; 0.004 on an H200


Results = tuple[Tensor, ...]
"""Of attention, and the gradients of queries, keys and values."""


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
    dropped: dict[str, str] = field(default_factory=dict)  # why, by kernel that should run here and did not

    def __str__(self) -> str:
        dropped = "".join(f"; {kernel} dropped out: {why}" for kernel, why in self.dropped.items())
        if not self.seconds:
            return f"attention {self.kernel}{dropped}"
        order = sorted(self.seconds, key=self.seconds.__getitem__)
        times = ", ".join(f"{kernel} {1e3 * self.seconds[kernel]:.2f}" for kernel in order)
        return f"attention {self.kernel}, the fastest for {self.shape.rows} x {self.shape.seq_len:,} tokens (ms per layer: {times}){dropped}"


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
            found[key] = _measured(spec, layer, kernels, short, dtype, device)
        result[layer.index] = found[key]
    return result


def _fallback(spec: ModelSpec) -> str:
    return "math" if spec.attention_softcap else "sdpa"


def _measured(
    spec: ModelSpec, layer: LayerSpec, kernels: Sequence[str], shape: Shape, dtype: torch.dtype, device: torch.device
) -> Choice:
    times: dict[str, float] = {}
    dropped: dict[str, str] = {}
    truth: Results | None = None
    for kernel in kernels:
        if (run := _ready(spec, layer, kernel, shape, dtype, device)) is None:
            continue
        try:
            results = run()
            truth = truth or results
            if (apart := _apart(results, truth)) < ALIKE:
                times[kernel] = statistics.median(_seconds(run, device) for _ in range(REPEATS))
            else:
                dropped[kernel] = f"its results are {apart:.1%} off"
        except Exception as error:  # a kernel that refuses says so in many words, each in an error of its own
            dropped[kernel] = " ".join(f"{type(error).__name__}: {error}".split())[:100]
    return Choice(min(times, key=times.__getitem__) if times else _fallback(spec), times, shape, dropped)


def _ready(
    spec: ModelSpec, layer: LayerSpec, kernel: str, shape: Shape, dtype: torch.dtype, device: torch.device
) -> Callable[[], Results] | None:
    """Forward and backward, the same numbers for every kernel; None where it is known not to run."""
    if (kernel == "flex" and device.type != "cuda") or (kernel == "flash4" and not flash4.can_run(device)):
        return None
    heads, kv_heads = max(1, spec.num_heads // shape.tp), max(1, spec.num_kv_heads // shape.tp)
    width = spec.head_dim
    if spec.is_latent:  # values are padded to the width of queries
        width, kv_heads = spec.qk_nope_head_dim + spec.qk_rope_head_dim, heads
    draw = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(shape.rows, shape.seq_len, num, width, device=device, dtype=dtype, generator=draw).requires_grad_()
        for num in (heads, kv_heads, kv_heads)
    )
    builder = MaskBuilder(shape.seq_len, 0, device)
    mask = builder.build((layer,), flex=kernel == "flex")[builder.key(layer)]

    def run() -> Results:
        y = attend(q, k, v, mask, kernel, softmax_scale(spec), spec.attention_softcap)
        return y.detach(), *torch.autograd.grad(y, (q, k, v), y)

    return run


def _apart(results: Results, truth: Results) -> float:
    """The largest distance, by norm. Not a number is far."""
    norm = torch.linalg.vector_norm
    apart = [
        norm(a - b, dtype=torch.float32) / norm(b, dtype=torch.float32) for a, b in zip(results, truth, strict=True)
    ]
    return float(torch.stack(apart).nan_to_num(torch.inf).max())


def _seconds(run: Callable[[], Results], device: torch.device) -> float:
    began = _now(device)
    for _ in range(TURN):
        run()
    return (_now(device) - began) / TURN


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
