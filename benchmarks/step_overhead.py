"""Our training loop against a bare PyTorch loop over the same model, step by step in turn, in one process.

The real loop runs; after each of its steps one step of the bare loop runs on the same data. The time of one of our
steps is everything between two bare steps: loading, agreeing, training, metrics, events, the view. A third loop, a
second bare one, shows how much of the difference is noise (A/A).

    python benchmarks/step_overhead.py [--steps 60] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from shardwise.config.load import load_config
from shardwise.launch.planner import RunPlanner
from shardwise.launch.start import new_run, plan_run
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.prove.repeat import repeat_first_steps
from shardwise.report.reporter import Reporter
from shardwise.report.terminal import LiveView
from shardwise.run.guards import StopRequests
from shardwise.run.loop import train
from shardwise.run.ranks import Ranks
from shardwise.run.session import Session


class Bare:
    """What one would write by hand."""

    def __init__(self, spec: Any, batches: list[tuple[torch.Tensor, torch.Tensor]]):
        self.model = Decoder(spec)
        initialize(self.model, 0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batches, self.index = batches, 0

    def step(self) -> float:
        start = time.perf_counter()
        tokens, targets = self.batches[self.index % len(self.batches)]
        self.index += 1
        loss = self.model(tokens, targets).cross_entropy / targets.numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()
        return time.perf_counter() - start


class InTurn(LiveView):
    """After each step of the real loop: a bare step, and another one."""

    bare: list[Bare]
    rows: list[tuple[float, float, float, float]]
    ended: float

    def step(self, line: dict[str, Any]) -> None:
        super().step(line)
        ours = time.perf_counter() - InTurn.ended
        order = (0, 1) if line["step"] % 2 else (1, 0)
        times = {which: InTurn.bare[which].step() for which in order}
        InTurn.rows.append((ours, times[0], times[1], line["data_wait_s"]))
        InTurn.ended = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        loaded = load_config(
            None,
            [
                f"run.dir={folder}",
                f"train.steps={args.steps}",
                "train.global_batch=16",
                "train.micro_batch=16",
                "train.seq_len=256",
            ],
        )
        job = plan_run(loaded, 1, progress=False)
        run = new_run(job)
        torch.set_num_threads(job.plan.threads_per_rank)
        sequences = [job.corpus.train.batch(step, range(16), 16) for step in range(1, 9)]
        batches = [(torch.from_numpy(b.tokens), torch.from_numpy(b.targets)) for b in sequences]
        InTurn.bare, InTurn.rows, InTurn.ended = (
            [Bare(job.spec, batches), Bare(job.spec, batches)],
            [],
            time.perf_counter(),
        )
        session = Session(run, job, Ranks(), torch.device("cpu"), 2**34)
        view, planner = InTurn(args.steps, None, quiet=True), RunPlanner(job.config, job.spec, "cpu")
        with StopRequests(run, None, print) as stops, Reporter(session, stops, repeat_first_steps, view) as reporter:
            train(session, stops, planner, reporter)
    rows = InTurn.rows[5:]
    ratios, control = [ours / bare for ours, bare, _, _ in rows], [a / b for _, a, b, _ in rows]
    quartiles = statistics.quantiles(ratios, n=4)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "steps": len(rows),
        "ours_over_bare": {"median": statistics.median(ratios), "quartiles": [quartiles[0], quartiles[2]]},
        "bare_over_bare": {"median": statistics.median(control)},
        "data_wait_share": sum(wait for *_, wait in rows) / sum(ours for ours, *_ in rows),
    }
    print(f"steps            {len(rows)} of each kind, in turn")
    print(
        f"ours / bare      {report['ours_over_bare']['median']:.4f}  (quartiles {quartiles[0]:.4f} to "
        f"{quartiles[2]:.4f}; target 1.03)"
    )
    print(f"bare / bare      {report['bare_over_bare']['median']:.4f}  (noise)")
    print(f"waiting for data {100 * report['data_wait_share']:.3f} % of our step (target 1 %)")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
