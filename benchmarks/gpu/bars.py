"""What was to be reached on one H200, and what the results say of it. No torch.

A bar without its rows is not judged. Nothing here is chosen after the fact: the best of our rows counts only where a bar says "any".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpu.shapes import CONTENDERS, PEAK_FLOPS, SMOKE

GIB = 2**30
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Bar:
    what: str
    needs: tuple[str, ...]  # rows, as shape/contender
    value: Callable[..., float]  # of these rows
    limit: float
    unit: str = ""
    below: bool = False  # the value must be at most the limit

    def holds(self, value: float) -> bool:
        return value <= self.limit if self.below else value >= self.limit


def speed(row: dict[str, Any]) -> float:
    return row["tokens_per_s"]


def mfu(row: dict[str, Any]) -> float:
    return row["tokens_per_s"] * row["flops_per_token"] / PEAK_FLOPS


def faster(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    return ours["tokens_per_s"] / theirs["tokens_per_s"]


def memory(ours: dict[str, Any], theirs: dict[str, Any]) -> float:
    return ours["peak_bytes"] / theirs["peak_bytes"]


def idle(row: dict[str, Any]) -> float:
    return row["profile"]["parts_s"]["idle"] / row["profile"]["window_s"]


def bars() -> Iterator[Bar]:
    for shape, first, then in (("1.5b", 66_000, 68_000), ("8b-wide", 42_000, 43_500)):
        yield Bar(f"{shape}: first", (f"{shape}/ours",), speed, first, "tok/s")
        yield Bar(f"{shape}: then", (f"{shape}/ours",), speed, then, "tok/s")
        for size in (16, 20):
            more = (f"{shape}/ours:micro_batch={size}",)
            yield Bar(f"{shape}: first, {size} sequences a step", more, speed, first, "tok/s")
            yield Bar(f"{shape}: then, {size} sequences a step", more, speed, then, "tok/s")
    for shape in ("1.5b", "1.5b-b4"):
        pair = (f"{shape}/ours", f"{shape}/transformers-compiled")
        yield Bar(f"{shape}: over compiled transformers", pair, faster, 1.4, "x")
        by_layers = (f"{shape}/ours", f"{shape}/transformers-layers")
        yield Bar(f"{shape}: over transformers, layers compiled", by_layers, faster, 1.4, "x")
        yield Bar(f"{shape}: memory over theirs", pair, memory, 1.0, "x", below=True)
    yield Bar("8b-wide: fp8 over our bf16", ("8b-wide/ours-fp8", "8b-wide/ours"), faster, 1.2, "x")
    tensorwise = ("8b-wide/ours-fp8-tensorwise", "8b-wide/ours")
    yield Bar("8b-wide: fp8, one scale per tensor", tensorwise, faster, 1.2, "x")
    yield Bar("8b-wide: fp8 with the head", ("8b-wide/ours-fp8-head", "8b-wide/ours"), faster, 1.3, "x")
    for shape, limit in (("8b", 0.50), ("moe", 0.35), ("32k", 0.60)):
        yield Bar(f"{shape}: MFU", (f"{shape}/ours",), mfu, limit)
    yield Bar("32k: MFU, 2 sequences a step", ("32k/ours:micro_batch=2",), mfu, 0.60)
    yield Bar("32k: MFU in fp8, of bf16's peak", ("32k/ours-fp8-head",), mfu, 0.60)
    yield Bar("128k: fits", ("128k/ours",), lambda row: row["peak_bytes"] / GIB, 140.0, "GiB", below=True)
    lora = ("lora-8b/ours", "lora-8b/peft-compiled")
    yield Bar("lora-8b: over compiled peft", lora, faster, 1.5, "x")
    yield Bar("lora-8b: memory over theirs", lora, memory, 1.0, "x", below=True)
    yield Bar("lora-8b: over peft compiled in one piece", ("lora-8b/ours", "lora-8b/peft-whole"), faster, 1.5, "x")
    for name in ("ours-fp8", "ours-fp8-tensorwise", "ours-fp8-head"):
        fp8 = (f"lora-8b/{name}", "lora-8b/peft-compiled")
        yield Bar(f"lora-8b: {name} over compiled peft", fp8, faster, 1.5, "x")
        yield Bar(f"lora-8b: {name}, memory over theirs", fp8, memory, 1.0, "x", below=True)
        yield Bar(f"lora-8b: {name}, idle", fp8[:1], idle, 0.02, below=True)
    yield Bar("lora-8b: all in bf16", ("lora-8b/ours-true", "lora-8b/peft-bf16"), faster, 1.5, "x")
    for shape, names in CONTENDERS.items():
        if shape not in SMOKE:
            for name in ("torchtitan", "torchtitan-fsdp"):
                if name in names:
                    yield Bar(f"{shape}: over {name}", (f"{shape}/ours", f"{shape}/{name}"), faster, 1.0, "x")
            yield Bar(f"{shape}: idle", (f"{shape}/ours",), idle, 0.02, below=True)


def judged(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What, bar, measured, verdict; one for each bar whose rows are there."""
    rows: Rows = {key: row for key, row in found.get("rows", {}).items() if "error" not in row}
    lines = []
    for bar in bars():
        if not all(key in rows for key in bar.needs) or (bar.value is idle and not rows[bar.needs[0]].get("profile")):
            continue
        value = bar.value(*(rows[key] for key in bar.needs))
        limit = f"{'<=' if bar.below else '>='} {written(bar.limit, bar.unit)}"
        lines.append((bar.what, limit, written(value, bar.unit), "holds" if bar.holds(value) else "**missed**"))
    return lines


def written(value: float, unit: str) -> str:
    if not unit:
        return f"{value:.1%}"
    return f"{value:,.0f} {unit}" if unit == "tok/s" else f"{value:.2f} {unit}"
