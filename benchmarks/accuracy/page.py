"""benchmarks/results/accuracy.md from the figures that `planner_accuracy.py --json` writes: the targets, each source,
what was skipped."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
REASONS = Path(__file__).resolve().parent / "reasons.toml"


def percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value * 100:.{digits}f} %"


def _targets(found: Figures) -> list[tuple[str, str, str, bool]]:
    """What is asked, the target, what came out, and whether it is reached."""
    clean, every = found["clean"]["overall"], found["all"]["overall"]
    step, memory, oom, rank = clean["step"], clean["memory"], every["oom"] or {}, every["ranking"]
    titan = found["clean"]["files"].get("torchtitan.csv", {}).get("memory", {}).get("p50")
    asked = [
        ("step time, clean rows: median error", step["median"], "<= 10 %", 0.10),
        ("step time, clean rows: mean error", step["mape"], "<= 15 %", 0.15),
        ("memory, clean rows: median error", memory["p50"], "<= 5 %", 0.05),
        ("memory, clean rows: nine of ten are within", memory["p90"], "<= 12 %", 0.12),
        ("memory, torchtitan's clean rows: median error", titan, "<= 5 %", 0.05),
        ("out of memory called right", oom.get("accuracy"), ">= 92 %", 0.92),
        ("ranking within groups of 5 rows or more: median Spearman", rank["spearman_median"], ">= 0.9", 0.9),
        ("... clean rows", clean["ranking"]["spearman_median"], ">= 0.9", 0.9),
        ("measured time of our pick over the best: median regret", rank["regret_median"], "<= 3 %", 0.03),
    ]
    return [
        (
            what,
            target,
            percent(value) if "%" in target else _two(value),
            value is not None and (value >= limit if target[0] == ">" else value <= limit),
        )
        for what, value, target, limit in asked
    ]


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _row(name: str, one: Figures) -> str:
    step, memory, oom, rank = one["step"], one["memory"], one["oom"] or {}, one["ranking"]
    cells = [
        name,
        str(one["rows"]),
        percent(step["median"]),
        percent(step["mape"]),
        percent(step["bias"]),
        percent(memory["p50"]),
        percent(memory["p90"]),
        percent(memory["p95"]),
        percent(oom.get("accuracy")),
        percent(oom.get("precision")),
        percent(oom.get("recall")),
        str(rank["groups"] or ""),
        _two(rank["spearman_median"]),
        percent(rank["regret_median"]),
    ]
    return f"| {' | '.join(cells)} |"


HEAD = [
    "| source | rows | step: median | mean | bias | memory: p50 | p90 | p95 | OOM right | precision | recall | groups "
    "| rank | regret |",
    "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
]


def page(found: Figures) -> str:
    lines = [
        "# How well the planner predicts",
        "",
        "<!-- Made by `python benchmarks/planner_accuracy.py DIR --page benchmarks/results/accuracy.md`. -->",
        "",
        "Published training runs of other frameworks, rebuilt row by row and predicted. What a framework *is* (which "
        "states it keeps in which format, its kernels,",
        "what it overlaps) is a profile in `benchmarks/stacks`; constants belong to the hardware, and nothing is "
        "fitted to a source. `python",
        "benchmarks/planner_accuracy.py DIR` does the same with any directory of such files. Last run",
        f"{found['date']}, shardwise {found['versions']['shardwise']}, {found['all']['overall']['rows']} rows in "
        f"{found['seconds']:.0f} s.",
        "",
        "| figure | target | reached | |",
        "|---|---|---|---|",
        *(
            f"| {what} | {target} | {shown} | {'yes' if ok else '**missed**'} |"
            for what, target, shown, ok in _targets(found)
        ),
        "",
        "Clean rows: at most 16 nodes, at least 15 % of the 16-bit peak (causal attention counted once), recomputation "
        "known. Errors are shares of the measured figure;",
        "bias is the median with its sign, positive where too much was predicted. Ranking is among runs of one model, "
        "cluster and batch; regret is the",
        "measured time of the run we would have picked over the best one's. A run is called out of memory when its "
        "process would need more than the card has.",
    ]
    for key, title in {"clean": "Clean rows", "all": "Every row"}.items():
        lines += ["", f"## {title}", "", *HEAD]
        lines += [_row(name.removesuffix(".csv"), one) for name, one in found[key]["files"].items() if one["rows"]]
        lines += [_row("**overall**", found[key]["overall"])]
    reasons = tomllib.loads(REASONS.read_text(encoding="utf-8")) if REASONS.exists() else {}
    if reasons:
        lines += ["", "## What is off, and why", ""]
        lines += [f"- **{name}**: {text}" for name, text in reasons.items()]
    lines += ["", "## Rows that are not used", "", "| source | rows | why |", "|---|---|---|"]
    lines += [
        f"| {name.removesuffix('.csv')} | {count} | {why} |"
        for name, rows in found["skipped"].items()
        for why, count in rows.items()
    ]
    lines += ["", "## What rows leave open", "", "| source | rows | assumed |", "|---|---|---|"]
    lines += [
        f"| {name.removesuffix('.csv')} | {count} | {word} |"
        for name, rows in found["assumed"].items()
        for word, count in rows.items()
    ]
    return "\n".join(lines) + "\n"
