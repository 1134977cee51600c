"""Targets for one H200, and what the results say of them. No torch.

A target without its rows is not judged. Nothing here is chosen after the fact: the best of our rows counts only where a
target says "any".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gpu.shapes import CONTENDERS, PEAK_FLOPS, SMOKE

GIB = 2**30
Rows = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Target:
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


def targets() -> Iterator[Target]:
    for shape, least, more in (("1.5b", 66_000, 68_000), ("8b-wide", 42_000, 43_500)):
        yield Target(f"{shape}: speed", (f"{shape}/ours",), speed, least, "tok/s")
        yield Target(f"{shape}: speed, further", (f"{shape}/ours",), speed, more, "tok/s")
        for size in (16, 20):
            rows = (f"{shape}/ours:micro_batch={size}",)
            yield Target(f"{shape}: speed, {size} sequences a step", rows, speed, least, "tok/s")
            yield Target(f"{shape}: speed, further, {size} sequences a step", rows, speed, more, "tok/s")
    for shape in ("1.5b", "1.5b-b4"):
        pair = (f"{shape}/ours", f"{shape}/transformers-compiled")
        yield Target(f"{shape}: over compiled transformers", pair, faster, 1.4, "x")
        by_layers = (f"{shape}/ours", f"{shape}/transformers-layers")
        yield Target(f"{shape}: over transformers, layers compiled", by_layers, faster, 1.4, "x")
        yield Target(f"{shape}: memory over theirs", pair, memory, 1.0, "x", below=True)
    yield Target("8b-wide: fp8 over our bf16", ("8b-wide/ours-fp8", "8b-wide/ours"), faster, 1.2, "x")
    tensorwise = ("8b-wide/ours-fp8-tensorwise", "8b-wide/ours")
    yield Target("8b-wide: fp8, one scale per tensor", tensorwise, faster, 1.2, "x")
    yield Target("8b-wide: fp8 with the head", ("8b-wide/ours-fp8-head", "8b-wide/ours"), faster, 1.3, "x")
    for shape, limit in (("8b", 0.50), ("moe", 0.35), ("32k", 0.60)):
        yield Target(f"{shape}: MFU", (f"{shape}/ours",), mfu, limit)
    yield Target("32k: MFU, 2 sequences a step", ("32k/ours:micro_batch=2",), mfu, 0.60)
    yield Target("32k: MFU in fp8, of bf16's peak", ("32k/ours-fp8-head",), mfu, 0.60)
    yield Target("128k: fits", ("128k/ours",), lambda row: row["peak_bytes"] / GIB, 140.0, "GiB", below=True)
    lora = ("lora-8b/ours", "lora-8b/peft-compiled")
    yield Target("lora-8b: over compiled peft", lora, faster, 1.5, "x")
    yield Target("lora-8b: memory over theirs", lora, memory, 1.0, "x", below=True)
    yield Target("lora-8b: over peft compiled in one piece", ("lora-8b/ours", "lora-8b/peft-whole"), faster, 1.5, "x")
    for name in ("ours-fp8", "ours-fp8-tensorwise", "ours-fp8-head"):
        fp8 = (f"lora-8b/{name}", "lora-8b/peft-compiled")
        yield Target(f"lora-8b: {name} over compiled peft", fp8, faster, 1.5, "x")
        yield Target(f"lora-8b: {name}, memory over theirs", fp8, memory, 1.0, "x", below=True)
        yield Target(f"lora-8b: {name}, idle", fp8[:1], idle, 0.02, below=True)
    yield Target("lora-8b: all in bf16", ("lora-8b/ours-true", "lora-8b/peft-bf16"), faster, 1.5, "x")
    for shape, names in CONTENDERS.items():
        if shape not in SMOKE:
            for name in ("torchtitan", "torchtitan-fsdp"):
                if name in names:
                    yield Target(f"{shape}: over {name}", (f"{shape}/ours", f"{shape}/{name}"), faster, 1.0, "x")
            yield Target(f"{shape}: idle", (f"{shape}/ours",), idle, 0.02, below=True)


def judged(found: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    """What, target, measured, verdict; one for each target whose rows are there."""
    rows: Rows = {key: row for key, row in found.get("rows", {}).items() if "error" not in row}
    lines = []
    for target in targets():
        if not all(key in rows for key in target.needs) or (
            target.value is idle and not rows[target.needs[0]].get("profile")
        ):
            continue
        value = target.value(*(rows[key] for key in target.needs))
        limit = f"{'<=' if target.below else '>='} {written(target.limit, target.unit)}"
        lines.append(
            (target.what, limit, written(value, target.unit), "holds" if target.holds(value) else "**missed**")
        )
    return lines


def written(value: float, unit: str) -> str:
    if not unit:
        return f"{value:.1%}"
    return f"{value:,.0f} {unit}" if unit == "tok/s" else f"{value:.2f} {unit}"
