"""What throughput.py found, for people: a table for terminals, a page, and a plot drawn by hand as SVG. No torch.

benchmarks/results/speed_h200.md is what `page` says of the committed results; a test compares them. docs/speed.md is
the prose beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from gpu.parts import PARTS
from gpu.shapes import PEAK_FLOPS, SHAPES, SMOKE, VARIANTS
from gpu.targets import judged, mfu

GIB = 2**30
PLOT = "speed_h200.svg"  # beside the page
RESULTS = Path(__file__).parents[1] / "results"
GOLDEN = RESULTS / "golden_h200.json"
PAGE = RESULTS / "speed_h200.md"
LABELS = {
    "ours": "Shardwise",
    "train": "`shardwise train`, whole run",
    "ours-fp8": "Shardwise, fp8, a scale per row",
    "ours-fp8-tensorwise": "Shardwise, fp8, a scale per tensor",
    "ours-fp8-head": "Shardwise, fp8, the head too",
    "plain": "plain PyTorch",
    "plain-bf16": "plain PyTorch, all bf16",
    "torchtitan": "torchtitan 0.2.2",
    "torchtitan-fsdp": "torchtitan 0.2.2, FSDP over one",
    "transformers": "transformers, eager",
    "transformers-compiled": "transformers, compiled",
    "transformers-layers": "transformers, layers compiled",
    "transformers-bf16": "transformers, layers compiled, all bf16",
    "peft": "peft, eager",
    "peft-compiled": "peft, layers compiled",
    "peft-whole": "peft, compiled",
    "peft-bf16": "peft, layers compiled, all bf16",
}
COLUMNS = ("attention", "matmul", "elementwise", "loss", "optimizer", "copies", "other", "idle")
PLOTTED = (
    "ours",
    "ours-fp8-head",
    "plain",
    "torchtitan",
    "torchtitan-fsdp",
    "transformers-layers",
    "transformers-compiled",
    "transformers",
    "peft-compiled",
    "peft-whole",
    "peft",
)


def label(contender: str) -> str:
    settings = VARIANTS.get(contender, contender).replace(",", ", ").replace("ours:", "Shardwise, ")
    return LABELS.get(contender, settings)


def by_shape(found: dict[str, Any]) -> Iterator[tuple[str, str, list[dict[str, Any]]]]:
    """Shape, its title, its rows; the fastest first, those without a figure last."""
    for name, shape in {**SHAPES, **SMOKE}.items():
        rows = [row for row in found["rows"].values() if row["shape"] == name]
        if rows:
            yield name, shape.title, sorted(rows, key=lambda row: -row.get("tokens_per_s", 0.0))


def frozen_mfu(row: dict[str, Any]) -> float:
    return row["tokens_per_s"] * row["frozen_flops_per_token"] / PEAK_FLOPS


def spread(row: dict[str, Any]) -> float:
    low, high = row["quartiles_s"]
    return (high - low) / row["median_s"]


def shares(row: dict[str, Any]) -> dict[str, float] | None:
    """Of the profiled window; collectives (`messages` in the file), which one GPU does not have, among the rest."""
    profile = row.get("profile")
    if not profile:
        return None
    parts = {name: seconds / profile["window_s"] for name, seconds in profile["parts_s"].items()}
    parts["other"] += sum(parts[name] for name in PARTS if name not in COLUMNS)
    return {name: parts[name] for name in COLUMNS}


def matmul_rate(row: dict[str, Any]) -> float | None:
    """FLOP/s while matmuls run, attention's own left out; only where every matmul runs once."""
    shape, notes = {**SHAPES, **SMOKE}[row["shape"]], row.get("notes") or {}
    runs_twice = notes.get("recompute", "none") != "none" or notes.get("loss") == "recompute"
    if not row.get("profile") or row["profile"]["parts_s"]["matmul"] == 0 or shape.adapter or runs_twice:
        return None
    spec = shape.spec
    work = 6 * (spec.num_active_parameters - spec.num_embedding_parameters) * row["tokens"]
    return work / row["profile"]["parts_s"]["matmul"]


def cells(row: dict[str, Any]) -> list[str]:
    """Tokens/s, spread, MFU, peak, predicted step and memory, parts; one text each."""
    if "error" in row:
        reason = {"memory": "out of memory", "missing": "not installed", "time": "no answer in time"}.get(
            row["kind"], "failed"
        )
        return [reason] + [""] * (5 + len(COLUMNS))
    peak, predicted, parts = row.get("peak_bytes"), row.get("predicted"), shares(row)
    share = f"{mfu(row):.1%}"
    if row.get("frozen_flops_per_token"):
        share += f" ({frozen_mfu(row):.1%})"
    return [
        f"{row['tokens_per_s']:,.0f}",
        f"{spread(row):.1%}",
        share,
        f"{peak / GIB:.1f}" if peak else "",
        f"{row['tokens'] / predicted['step_s']:,.0f}" if predicted else "",
        f"{predicted['memory_bytes'] / GIB:.1f}" if predicted else "",
        *([f"{100 * parts[name]:.1f}" for name in COLUMNS] if parts else [""] * len(COLUMNS)),
    ]


HEADS = ("tok/s", "spread", "MFU", "GiB", "predicted", "GiB", *COLUMNS)


def table(found: dict[str, Any]) -> str:
    lines = []
    for name, title, rows in by_shape(found):
        lines += ["", f"{name}: {title}", f"  {'':<40}" + "".join(f"{head:>12}" for head in HEADS)]
        for row in rows:
            lines.append(f"  {row['contender'][:40]:<40}" + "".join(f"{cell:>12}" for cell in cells(row)))
            if row.get("recompiled") or row.get("graph_breaks"):
                lines.append(
                    f"  {'':<40}{row['recompiled']} recompiled while measured, {row['graph_breaks']} graph breaks"
                )
            if "error" in row:
                lines.append(f"  {'':<40}{row['error'][:140]}")
    lines += ["", *(f"  {what:<40}{limit:>16}{value:>16}   {verdict}" for what, limit, value, verdict in judged(found))]
    return "\n".join(lines)


def tables(found: dict[str, Any]) -> str:
    """For the page, in Markdown."""
    if not found.get("rows"):
        return "Not measured yet."
    machine, ceiling = found.get("machine") or {}, found.get("ceiling") or {}
    dates = sorted({row["date"] for row in found["rows"].values() if "date" in row})
    versions = sorted({row["versions"]["torch"] for row in found["rows"].values() if row.get("versions")})
    lines = [
        f"{machine.get('name', 'One GPU')}, driver {machine.get('driver_version', 'unknown')}, torch "
        f"{', '.join(versions)}, {' to '.join(dates[:1] + dates[1:][-1:])}. "
        f"Square matmuls alone reach {max(ceiling.values(), default=0.0):.0f} TFLOP/s there (bf16). "
        "Parts are percent of a step's time on the device.",
        "",
        f"![tokens per second by shape]({PLOT})",
    ]  # fmt: skip
    for _, title, rows in by_shape(found):
        lines += [
            "",
            f"## {title}",
            "",
            "| | tok/s | spread | MFU | peak GiB | predicted tok/s | predicted GiB | matmul TFLOP/s | "
            + " | ".join(COLUMNS)
            + " |",
        ]
        lines.append("|---" + "|---:" * (7 + len(COLUMNS)) + "|")
        for row in rows:
            texts, rate = cells(row), None if "error" in row else matmul_rate(row)
            texts.insert(6, f"{rate / 1e12:.0f}" if rate else "")
            lines.append(f"| {label(row['contender'])} | " + " | ".join(texts) + " |")
    if targets := judged(found):
        lines += ["", "## Targets", "", "| | target | measured | |", "|---|---:|---:|---|"]
        lines += [f"| {' | '.join(line)} |" for line in targets]
    return "\n".join(lines)


def golden_table(found: dict[str, Any]) -> str:
    """What throughput.py --golden found, in Markdown."""
    runs = {name: run for name, run in found.get("runs", {}).items() if "holds" in run}
    if not runs:
        return "Not measured yet."
    lines = [
        f"{found['device']}, torch {found['versions']['torch']}, {found['date']}: {found['model']}, {found['steps']} "
        "steps" + (f"; fp8 and what is called wide: {found['wide_model']}." if "wide_model" in found else "."),
        "",
        "| | last tenth, off by | limit | largest difference of a loss | of the first | |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for name, run in runs.items():
        cells = [f"{run['last_tenth_off']:+.3%}", f"{run['limit']:.1%}", f"{run['max_difference']:.4f}"]
        cells += [f"{run['first_difference']:.6f}", "holds" if run["holds"] else "**moves the loss**"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(found: dict[str, Any], golden: dict[str, Any]) -> str:
    """The whole page in Markdown: every measured row, the targets, and how far each setting moves the loss."""
    lines = [
        "# Tokens per second on one H200",
        "",
        "<!-- Made by `python benchmarks/gpu/throughput.py --json benchmarks/results/throughput_h200.json --show "
        "--page`;",
        "a test fails when it is out of date. -->",
        "",
        "How these rows are measured, and what they mean: [docs/speed.md](../../docs/speed.md).",
        "",
        tables(found),
        "",
        "## Losses with each setting",
        "",
        golden_table(golden),
    ]
    return "\n".join(lines) + "\n"


STYLE = """
text { font: 13px system-ui, sans-serif; fill: #59636e }
.title { font-weight: 600; fill: #1f2328 }
.ours { fill: #0969da } .other { fill: #afb8c1 } .line { stroke: #d1d9e0 }
@media (prefers-color-scheme: dark) {
  text { fill: #9198a1 } .title { fill: #f0f6fc }
  .ours { fill: #4493f8 } .other { fill: #515a64 } .line { stroke: #3d444d }
}
"""


def _plotted(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of ours the default, or the fastest where it was not measured."""
    ours = [row for row in rows if row["contender"].split(":")[0].split("-")[0] == "ours"]
    best = [] if any(row["contender"] == "ours" for row in ours) else sorted(ours, key=lambda row: -row["tokens_per_s"])
    return best[:1] + [row for row in rows if row["contender"] in PLOTTED and row not in best[:1]]


def plot(found: dict[str, Any]) -> str:
    """Rows by shape: tokens per second as text, MFU as a length, so that shapes can be compared."""
    left, wide, row_height, most = 250, 360, 20, 0.8
    body, y = [], 10
    for _, title, rows in by_shape(found):
        shown = _plotted([row for row in rows if "error" not in row])
        if not shown:
            continue
        y += 22
        body.append(f'<text class="title" x="0" y="{y}">{escape(title)}</text>')
        y += 8
        for row in shown:
            width, kind = wide * min(mfu(row), most) / most, "ours" if row["contender"].startswith("ours") else "other"
            body.append(f'<text x="{left - 8}" y="{y + 14}" text-anchor="end">{escape(label(row["contender"]))}</text>')
            body.append(
                f'<rect class="{kind}" x="{left}" y="{y + 3}" width="{width:.1f}" height="{row_height - 6}" rx="2"/>'
            )
            figure = f"{row['tokens_per_s']:,.0f} tok/s, {mfu(row):.0%}"
            body.append(f'<text x="{left + width + 6:.1f}" y="{y + 14}">{figure}</text>')
            y += row_height
    for tenth in range(0, 9, 2):
        x = left + wide * tenth / 10 / most
        body.append(f'<line class="line" x1="{x:.1f}" y1="14" x2="{x:.1f}" y2="{y + 4}" stroke-dasharray="2 4"/>')
        body.append(f'<text x="{x:.1f}" y="{y + 20}" text-anchor="middle">{10 * tenth} %</text>')
    height, about = y + 28, "Tokens per second and model FLOPs utilization on one GPU, by shape"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {height}" width="760" height="{height}" role="img">'
        f"<title>{about}</title><style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )
