"""How long the planner searches: CPU seconds of one core, layouts considered, pruned and predicted, peak memory of the
process.

    python benchmarks/plan_search.py [--detail] [--out FILE]

Every question runs in a process of its own, because caches and peak memory outlive a question. `--detail`: also what
`shardwise plan` shows beside the ranking (best layout per number of GPUs, rejected regions, Pareto set). Wall time is
printed too; on a busy machine it says little.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from typing import Any

from shardwise.cluster.describe.read import read_cluster
from shardwise.plan.layouts.search import explore
from shardwise.spec.job import Job
from shardwise.spec.presets import preset

QUESTIONS = {
    "70B on 512": ("llama3-70b", "64x8xh100", Job(8192, 512), 1.0),
    "405B on 16,384": ("llama3-405b", "2048x8xh100", Job(8192, 2048), 5.0),
    "8B on 8": ("llama3-8b", "1x8xh100", Job(8192, 128), None),
    "experts on 2,048": ("deepseek-v3", "256x8xh100", Job(4096, 4096), None),
}
"""Model, cluster, job, and the seconds to stay below."""


def measure(name: str, detail: bool) -> dict[str, Any]:
    model, cluster, job, target = QUESTIONS[name]
    spec, hardware = preset(model), read_cluster(cluster)
    wall, cpu = time.perf_counter(), time.process_time()
    result = explore(spec, hardware, job, detail=detail)  # as many rows as `shardwise plan` shows
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    best, counts = result.candidates[0], result.counts
    return {
        "question": name,
        "cpu_s": round(cpu, 3),
        "wall_s": round(wall, 3),
        "target_s": target,
        "considered": counts.considered,
        "too_large": counts.too_large,
        "too_slow": counts.too_slow,
        "predicted": counts.evaluated,
        "peak_MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "best": f"{best.plan.layout} micro_batch={best.plan.micro_batch}",
        "step_s": round(best.prediction.step_s, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--detail", action="store_true")
    parser.add_argument("--out")
    parser.add_argument("--only", choices=QUESTIONS, help="one question, in this process")
    args = parser.parse_args()
    if args.only:
        print(json.dumps(measure(args.only, args.detail)))
        return
    rows = []
    for name in QUESTIONS:
        command = [sys.executable, __file__, "--only", name, *(["--detail"] if args.detail else [])]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        target = f"(target {row['target_s']:g} s)" if row["target_s"] else ""
        print(f"{name:<18} {row['cpu_s']:6.2f} s of one core {target:<12} {row['peak_MiB']:4d} MiB", end="  ")
        print(f"{row['considered']:>12,} layouts, {row['too_large']:,} too large, {row['predicted']:,} predicted")
        print(f"{'':<18} {row['step_s']} s  {row['best']}")
        rows.append(row)
    if args.out:
        about = {"python": platform.python_version(), "machine": platform.processor() or platform.machine()}
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"detail": args.detail, **about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
