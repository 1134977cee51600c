"""Each part of a predicted step beside the same part of its profile, for the rows of ours that throughput.py measured.
No GPU needed.

    python benchmarks/gpu/predicted_parts.py FILE [--words products=library ...]     FILE of throughput.py --json

A row is predicted with what `auto` is today; `--words` says how it was measured where that was otherwise. Milliseconds,
predicted / measured. Profiles count cuDNN's small kernels as `other`, so these stand with attention here, and what
nothing hides of the host with `idle`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.shapes import VARIANTS, Case, case_of
from gpu.with_ours import adapter_of, options_of, plan_of, run_with

from shardwise.cluster.describe.table import known_cluster
from shardwise.plan.prediction.operations import embedding_work, head_work, layer_work
from shardwise.plan.prediction.step_time import layer_times, step_seconds
from shardwise.plan.resolve.speed import stack_of
from shardwise.spec.job import Job

PARTS = {
    "attention": ("attention", "other"),
    "matmuls": ("matmul",),
    "passes": ("elementwise", "loss", "copies"),
    "optimizer": ("optimizer",),
    "idle": ("idle",),
}


def predicted_parts(case: Case, kind: str = "h200") -> dict[str, float]:
    """Seconds. What is computed again is divided in the same way: the rest of its time is passes."""
    plan, spec = plan_of(case), case.shape.spec
    optimizer = options_of(case).get("optimizer", "adamw")
    job = Job(plan.seq_len, plan.global_batch, None, plan.precision, optimizer, adapter_of(case))
    cluster, stack = known_cluster(kind, 1, 1), stack_of(plan)
    times, found = layer_times(spec, cluster, job, plan, stack), dict.fromkeys(PARTS, 0.0)
    price, layer = times.pricer, layer_work(spec, spec.layers[-1], times.shape, stack)
    ends = head_work(spec, times.shape, stack), embedding_work(spec, times.shape, stack)
    for count, work in [(spec.num_layers, layer)] + [(1, end) for end in ends]:
        several = [(work.forward, False), (work.inputs, True), (work.weights, False)]
        several += [(work.forward, False)] if work is layer and plan.recompute == "full" else []
        for part, backward in several:
            found["matmuls"] += count * sum(map(price.matmul, part.matmuls))
            found["attention"] += count * sum(price.attention(one, backward) for one in part.attention)
            gaps = len(part.matmuls) + len(part.attention) + len(part.passes)
            found["idle"] += count * price.gap * gaps
    step = step_seconds(spec, cluster, job, plan, stack)
    found["optimizer"], found["idle"] = step["optimizer"], found["idle"] + step.get("launch", 0.0)
    return found | {"passes": sum(step.values()) - sum(found.values())}


def table(rows: list[dict[str, Any]], words: list[str]) -> None:
    print(f"{'milliseconds':<30}" + "".join(f"{name:>20}" for name in (*PARTS, "step")))
    for row in rows:
        text = VARIANTS.get(row["contender"], row["contender"])
        text += (":" if ":" not in text else ",") + ",".join(words) if words else ""
        case = run_with(case_of(row["shape"], text), row.get("notes") or {})
        said, measured = predicted_parts(case), row.get("profile")
        cells = [f"{said[name] * 1e3:.1f} / " for name in PARTS]
        if measured:
            parts = measured["parts_s"]
            cells = [
                f"{cell}{sum(parts[one] for one in PARTS[name]) * 1e3:.1f}"
                for cell, name in zip(cells, PARTS, strict=True)
            ]
        total = sum(said.values())
        cells.append(f"{total * 1e3:.0f} / {row['median_s'] * 1e3:.0f} {total / row['median_s'] - 1:+.1%}")
        print(f"{row['shape'] + ' ' + row['contender']:<30}" + "".join(f"{cell:>20}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--words", nargs="+", default=[])
    asked = parser.parse_args()
    rows = json.loads(asked.file.read_text(encoding="utf-8"))["rows"].values()
    table([row for row in rows if row["contender"].startswith("ours") and row.get("median_s")], asked.words)


if __name__ == "__main__":
    main()
