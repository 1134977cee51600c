"""Chooses the attention kernel that is fastest here, for these shapes: measured, once, before a run on a GPU.

What a kernel takes depends on the GPU, the versions of torch and cuDNN, the head's width and the length of sequences,
so no table is kept. A candidate that cannot run this shape drops out, and so does one whose results are not the first
one's. Read next: model/attention_kernels.py and flash4.py, which have the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwise.kernels import flash4
from shardwise.kernels.timing import median_seconds
from shardwise.model.attention_kernels import AttentionKernel
from shardwise.model.decoder import Decoder
from shardwise.model.masking import MaskBuilder
from shardwise.model.rope import softmax_scale
from shardwise.spec.model import LayerSpec, ModelSpec

MOST_TOKENS = 16384  # tokens of a measurement: beyond, the order of kernels does not change, their time does
TURNS, CALLS = 3, 6  # per kernel; the calls of a turn wait for nothing between them, as in a step
PLAIN, MASKED, CAPPED = ("cudnn", "flash", "flash4"), ("flex", "sdpa"), ("flex", "math")
ALIKE = 0.02  # how far apart results of two kernels in 16 bits may be, by norm; 0.004 on an H200

Results = tuple[Tensor, ...]
"""What attention computes: its output, and the gradients of queries, keys and values."""


@dataclass(frozen=True)
class AttentionShape:
    """The rows of one micro-batch, their tokens, and over how many ranks the heads are split."""

    rows: int
    seq_len: int
    tp: int = 1


@dataclass(frozen=True)
class KernelChoice:
    """The fastest kernel of a layer, by name, and why it is that."""

    kernel: str
    seconds: dict[str, float]  # of forward and backward, for each kernel that runs here
    shape: AttentionShape
    dropped: dict[str, str] = field(default_factory=dict)  # kernel that should run here and did not -> why

    def __str__(self) -> str:
        dropped = "".join(f"; {kernel} dropped out: {why}" for kernel, why in self.dropped.items())
        if not self.seconds:
            return f"attention {self.kernel}{dropped}"
        order = sorted(self.seconds, key=self.seconds.__getitem__)
        times = ", ".join(f"{kernel} {1e3 * self.seconds[kernel]:.2f}" for kernel in order)
        tokens = f"{self.shape.rows} x {self.shape.seq_len:,} tokens"
        return f"attention {self.kernel}, the fastest for {tokens} (ms per layer: {times}){dropped}"


def apply_fastest_attention(
    model: Decoder, layers: Sequence[LayerSpec], shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> None:
    """Gives each of the model's `layers` the kernel that is fastest for it, in place; `kernel_reason` says why."""
    chosen = choose(model.spec, layers, shape, dtype, device)
    use_kernels(model, {index: choice.kernel for index, choice in chosen.items()})
    model.kernel_reason = "; ".join(sorted({str(choice) for choice in chosen.values()}))


def use_kernels(model: Decoder, names: Mapping[int, str]) -> None:
    """Sets the attention kernel of each layer, by layer index and kernel name."""
    model.use_kernels({index: _kernel(name) for index, name in names.items()})


def _kernel(name: str) -> AttentionKernel:
    kernel = flash4.kernel_named(name)
    assert isinstance(kernel, AttentionKernel), f"{name} is no kernel"
    return kernel


def candidates(spec: ModelSpec, layer: LayerSpec, seq_len: int) -> tuple[str, ...]:
    if spec.attention_softcap:
        return CAPPED
    return MASKED if layer.window is not None and layer.window < seq_len else PLAIN


def choose(
    spec: ModelSpec,
    layers: Sequence[LayerSpec],
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
    among: tuple[str, ...] = (),
) -> dict[int, KernelChoice]:
    """Returns the fastest kernel by layer index; layers that see as much share a measurement. `among` has names to
    choose from instead of the usual candidates."""
    length = min(shape.seq_len, MOST_TOKENS)
    short = AttentionShape(max(1, min(shape.rows, MOST_TOKENS // length)), length, shape.tp)
    found: dict[tuple[tuple[str, ...], int | None], KernelChoice] = {}
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
    spec: ModelSpec,
    layer: LayerSpec,
    kernels: Sequence[str],
    shape: AttentionShape,
    dtype: torch.dtype,
    device: torch.device,
) -> KernelChoice:
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
                (times[kernel],) = median_seconds([run], device, turns=TURNS, calls=CALLS)
            else:
                dropped[kernel] = f"its results are {apart:.1%} off"
        except Exception as error:  # a kernel that refuses says so in many words, each in an error of its own
            dropped[kernel] = " ".join(f"{type(error).__name__}: {error}".split())[:100]
    return KernelChoice(min(times, key=times.__getitem__) if times else _fallback(spec), times, shape, dropped)


def _ready(
    spec: ModelSpec, layer: LayerSpec, kernel: str, shape: AttentionShape, dtype: torch.dtype, device: torch.device
) -> Callable[[], Results] | None:
    """Returns a function that does forward and backward of the same tensors for every kernel; None where it is known
    not to run."""
    if (kernel == "flex" and device.type != "cuda") or (kernel == "flash4" and not flash4.can_run(device)):
        return None
    heads, kv_heads = max(1, spec.num_heads // shape.tp), max(1, spec.num_kv_heads // shape.tp)
    width = spec.head_dim  # to which narrower values are padded
    draw = torch.Generator(device).manual_seed(0)
    q, k, v = (
        torch.randn(shape.rows, shape.seq_len, num, width, device=device, dtype=dtype, generator=draw).requires_grad_()
        for num in (heads, kv_heads, kv_heads)
    )
    builder = MaskBuilder(shape.seq_len, 0, device)
    mask = builder.build((layer,), flex=kernel == "flex")[builder.key(layer)]

    def run() -> Results:
        y = _kernel(kernel).compute(q, k, v, mask, softmax_scale(spec), spec.attention_softcap)
        return y.detach(), *torch.autograd.grad(y, (q, k, v), y)

    return run


def _apart(results: Results, truth: Results) -> float:
    """Returns the largest distance of a tensor, relative to its norm; infinity where one is not a number."""
    norm = torch.linalg.vector_norm
    apart = [
        norm(a - b, dtype=torch.float32) / norm(b, dtype=torch.float32) for a, b in zip(results, truth, strict=True)
    ]
    return float(torch.stack(apart).nan_to_num(torch.inf).max())
