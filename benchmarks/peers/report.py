"""From step times to medians, paired ratios and verdicts, and how they are printed."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from peers.variants import BASELINES, MAX_AA, MIN_ROUNDS, TARGETS, VARIANTS, Target

RESAMPLES = 2000


def ratio(above: list[float], below: list[float]) -> dict[str, Any]:
    """Median of the rounds' ratios, its quartiles, and a bootstrap interval of the median."""
    ratios = np.array(above) / np.array(below)
    picks = np.random.default_rng(0).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(ratios[picks], axis=1), (0.025, 0.975))
    first, third = np.quantile(ratios, (0.25, 0.75))
    return {
        "median": float(np.median(ratios)),
        "quartiles": [float(first), float(third)],
        "interval_95": [float(low), float(high)],
    }


def summarise(variants: dict[str, dict[str, Any]], step_s: dict[str, list[float]], ranks: int) -> dict[str, Any]:
    """`variants` is what the ranks said about each; it is extended by the figures."""
    for name, seconds in step_s.items():
        variant, baseline = variants[name], VARIANTS[name].baseline
        variant["median_ms"] = 1000 * float(np.median(seconds))
        variant["quartiles_ms"] = [1000 * float(q) for q in np.quantile(seconds, (0.25, 0.75))]
        if baseline in step_s and baseline != name:
            variant["baseline"], variant["ratio"] = baseline, ratio(seconds, step_s[baseline])
    control = {
        name: ratio(step_s[again], step_s[name])
        for name in BASELINES
        if name in step_s and (again := f"{name}-again") in step_s
    }
    return {
        "a_over_a": control,
        "variants": variants,
        "targets": [_judge(target, step_s, control) for target in TARGETS if target.ranks in (0, ranks)],
    }


def _judge(target: Target, step_s: dict[str, list[float]], control: dict[str, Any]) -> dict[str, Any]:
    entry: dict[str, Any] = {"ours": target.ours, "peer": target.peer, "limit": target.limit, "strict": target.strict}
    absent = [name for name in (target.ours, target.peer) if name not in step_s]
    if absent:
        return {**entry, "verdict": f"not measured: no {' and no '.join(absent)}"}
    entry["ratio"] = ratio(step_s[target.ours], step_s[target.peer])
    rounds, same = len(step_s[target.ours]), control.get(VARIANTS[target.ours].baseline)
    if rounds < MIN_ROUNDS:
        return {**entry, "verdict": f"not judged: {rounds} rounds, {MIN_ROUNDS} are needed"}
    if same is None or abs(same["median"] - 1) > MAX_AA:
        return {**entry, "verdict": f"not judged: A/A {same['median']:.3f}" if same else "not judged: no A/A"}
    return {**entry, "verdict": _verdict(entry["ratio"], target)}


def _verdict(found: dict[str, Any], target: Target) -> str:
    def holds(value: float) -> bool:
        return value < target.limit if target.strict else value <= target.limit

    if not holds(found["median"]):
        return "missed"
    return "holds" if holds(found["interval_95"][1]) else "holds by its median, not by its interval"


def show(report: dict[str, Any]) -> None:
    console = Console(width=None if Console().is_terminal else 150)
    table = Table(title=f"{report['ranks']} ranks, {report['rounds']} rounds, in turn")
    for column in ("variant", "median step", "over", "ratio", "quartiles", "95 % of the median"):
        table.add_column(column, justify="left" if column in ("variant", "over") else "right")
    for name, variant in report["variants"].items():
        label = VARIANTS[name].label
        if variant["status"] != "ok":
            table.add_row(label, variant["status"])
            continue
        cells = _cells(variant["ratio"]) if "ratio" in variant else ("1", "", "")
        table.add_row(label, f"{variant['median_ms']:.1f} ms", variant.get("baseline", ""), *cells)
    console.print(table)
    for name, found in report["a_over_a"].items():
        within = "within" if abs(found["median"] - 1) <= MAX_AA else "NOT within"
        console.print(f"A/A  {name}: {found['median']:.4f}, {within} {100 * MAX_AA:.0f} %")
    targets = Table(title="targets")
    for column in ("ours / peer", "target", "ratio", "quartiles", "95 % of the median", "verdict"):
        targets.add_column(column)
    for entry in report["targets"]:
        limit = f"{'<' if entry['strict'] else '<='} {entry['limit']:.2f}"
        cells = _cells(entry["ratio"]) if "ratio" in entry else ("", "", "")
        targets.add_row(f"{entry['ours']} / {entry['peer']}", limit, *cells, entry["verdict"])
    console.print(targets)


def _cells(found: dict[str, Any]) -> tuple[str, str, str]:
    (q1, q3), (low, high) = found["quartiles"], found["interval_95"]
    return f"{found['median']:.3f}", f"{q1:.3f} to {q3:.3f}", f"{low:.3f} to {high:.3f}"
