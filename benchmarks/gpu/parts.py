"""Where a step's time on the device went, by the names of kernels in a profiler's trace. No torch.

Every moment between the first kernel's start and the last one's end counts once: for the kernel that started first
among those running, or as idle. So parts and idle add up to the window. The head's matmuls are matmuls like
all others; `loss` is what cross-entropy does besides them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

PARTS = ("attention", "matmul", "elementwise", "loss", "optimizer", "copies", "messages", "other")
"""Names that results/throughput_h200.json has: copies of memory; messages are collectives."""
STEP = "a step"  # the name that a range of a trace has
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
WAITS = re.compile(r"(Stream|Device|Event)Synchronize$")
MADE_BY_COMPILER = re.compile(r"triton_(poi|red|per|for|mix)_")  # named after all operations that are in them
RULES = [
    (re.compile(pattern, re.IGNORECASE), part)
    for pattern, part in (
        (r"nccl", "messages"),
        (r"memcpy|memset|multi_tensor.*copy|direct_copy|CatArray|split_with_sizes|chunk_cat|FillFunctor", "copies"),
        (r"adam|multi_tensor_apply|LpNorm|^_squared_norm|^_squares|sgd|fused_update", "optimizer"),
        (r"flash|fmha|sdpa|attention|flex", "attention"),
        (r"gemm|nvjet|cutlass|cublas|xmma|wgmma|splitk|_mm\b|_mm_|matmul|scaled_mm|grouped", "matmul"),
        (r"softmax|nll|cross_entropy|logsumexp|log_sum_exp|linear_loss", "loss"),
        (
            r"elementwise|norm|lora_add|reduce|vectorized|embedding|index|rope|rotary|silu|swiglu|scatter|gather|sort"
            r"|triton|elem|cub|scan|topk|histc|bincount|arange",
            "elementwise",
        ),
    )
]
COMPILED_RULES = [
    (re.compile(pattern), part)
    for pattern, part in (
        (r"^triton_for_|adam|lerp", "optimizer"),
        (r"softmax|nll|logsumexp|cross_entropy", "loss"),
        (r"^triton_poi_fused_(_to_copy|clone|copy|zeros|new_zeros)(_view|_t|_transpose)*_\d+$", "copies"),
        (r"", "elementwise"),
    )
]


class Busy(NamedTuple):
    name: str
    start: float  # microseconds
    end: float


def part_of(name: str) -> str:
    rules = COMPILED_RULES if MADE_BY_COMPILER.match(name) else RULES
    return next((part for rule, part in rules if rule.search(name)), "other")


def kernels(trace: dict[str, Any]) -> list[Busy]:
    """What ran on the device, from a trace in Chrome's format."""
    found = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in ON_DEVICE]
    return sorted((Busy(e["name"], e["ts"], e["ts"] + e["dur"]) for e in found), key=lambda busy: busy.start)


def begins(trace: dict[str, Any]) -> list[float]:
    """When the first kernel of each step began, where steps were named; of the stream that has most of them."""
    streams: dict[Any, list[float]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "gpu_user_annotation" and event["name"] == STEP:
            streams.setdefault(event.get("tid"), []).append(event["ts"])
    return sorted(max(streams.values(), key=len, default=[]))


def waits(trace: dict[str, Any]) -> int:
    """How often the host stood still until the device was done."""
    runtime = [event for event in trace["traceEvents"] if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    return sum(WAITS.search(event["name"]) is not None for event in runtime)


def divide(busy: Iterable[Busy]) -> tuple[dict[str, float], Counter[str]]:
    """Microseconds by part with `idle`, and by kernel. `busy` is sorted by start."""
    parts, names = dict.fromkeys((*PARTS, "idle"), 0.0), Counter[str]()
    until: float | None = None
    for name, start, end in busy:
        until = start if until is None else until
        parts["idle"] += max(0.0, start - until)
        own = max(0.0, end - max(start, until))
        parts[part_of(name)] += own
        names[name] += own  # type: ignore[assignment]
        until = max(until, end)
    return parts, names


def gaps(busy: Iterable[Busy]) -> Counter[tuple[str, str]]:
    """Idle microseconds by the kernels before and after: where the host, or a wait for it, came too late. `busy` is
    sorted by start."""
    found, until, last = Counter[tuple[str, str]](), 0.0, ""
    for name, start, end in busy:
        if last and start > until:
            found[last, name] += start - until  # type: ignore[assignment]
        if end > until:
            until, last = end, name
    return found


def profile_of(trace: dict[str, Any], steps: int, before: int = 0, top: int = 25) -> dict[str, Any]:
    """Seconds per step. The steps `before` are left out: the device has been waited for, and the host is not ahead of
    it yet as it is in training. Whoever reads it can see by `kernels` what was counted where."""
    starts = begins(trace)
    if before and len(starts) != before + steps:  # not known where they end
        steps, before = steps + before, 0
    busy = [one for one in kernels(trace) if not before or one.start >= starts[before]]
    parts, names = divide(busy)
    per_step = {name: microseconds / steps / 1e6 for name, microseconds in parts.items()}
    return {
        "parts_s": per_step,
        "window_s": sum(per_step.values()),
        "busy_s": sum(per_step.values()) - per_step["idle"],
        "host_waits": waits(trace) / (steps + before),
        "kernels": [[part_of(n), round(us / steps / 1e3, 4), n[:150]] for n, us in names.most_common(top)],
        "gaps": [[round(us / steps / 1e3, 4), *(n[:100] for n in pair)] for pair, us in gaps(busy).most_common(8)],
    }
