"""What it costs that tokens travel to their experts: the share of a mixture-of-experts training step that dispatch and
combine take.

    python benchmarks/expert_dispatch.py [--steps 20] [--out FILE]

Four ranks (dp=4 ep=4), real processes, real collectives. Two models: `tiny-moe` with a mixture in every layer, and one
with Mixtral's proportions at an eighth of its width. Steps of three kinds take turns: with dispatch; and twice without,
where the same number of rows goes straight through the rank's own experts: no sorting, no counts, no exchange, no way
back. What a step with dispatch takes more is dispatch and combine. Both kinds without it show the noise. Routing is
forced to be even, so that no rank waits for a busier one. Two clocks: the wall's, and that of the processors over all
ranks, gloo's threads included. With fewer free cores than ranks only the second says something.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor

from shardwise.model.experts import Choice, Experts, MixtureOfExperts, Router, moe_layers
from shardwise.optim.build import build_optimizer
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

WORLD = 4
TARGET = 0.10
EVERY = {"moe_every": 1, "aux_loss_coef": 0.01}
SHAPED = {
    "num_layers": 2,
    "hidden": 512,
    "num_heads": 8,
    "num_kv_heads": 2,
    "head_dim": 64,
    "expert_ffn": 1792,
    "vocab": 2048,
}
SPECS = {
    "tiny-moe": preset("tiny-moe").with_overrides(EVERY | {"num_layers": 4}),
    "mixtral / 8": preset("mixtral-8x7b").with_overrides(SHAPED),
}
TRIAL = Trial(global_batch=WORLD * 2, micro_batch=2, seq_len=256, precision="fp32")
KINDS = ("dispatch", "stay", "stay again")
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each kind")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "expert_dispatch.json")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (args.steps, folder), nprocs=WORLD)
        measured = json.loads((Path(folder) / "rounds.json").read_text())
    rows = {name: {clock: _summary(rounds) for clock, rounds in clocks.items()} for name, clocks in measured.items()}
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "cpus": len(os.sched_getaffinity(0)),
        "load_average_before": load,
        "rounds": args.steps,
        "target": TARGET,
        "rows": rows,
    }
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    for name, clocks in rows.items():
        for clock, row in clocks.items():
            (low, high), noise = row["quartiles"], row["noise"]
            print(
                f"{name:<12} {clock:<5} {row['share']:6.1%} of a step ({low:.1%} to {high:.1%}; noise {noise:+.1%}; "
                f"target {TARGET:.0%})"
            )


def _summary(rounds: list[list[float]]) -> dict[str, Any]:
    shares = [1 - (stay + again) / 2 / dispatch for dispatch, stay, again in rounds]
    return {
        "share": statistics.median(shares),
        "quartiles": statistics.quantiles(shares, n=4)[::2],
        "noise": statistics.median(1 - b / a for _, a, b in rounds),
        "step_s": dict(zip(KINDS, map(statistics.median, zip(*rounds, strict=True)), strict=True)),
    }


def _rank(rank: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD)
    route = Router.forward
    Router.forward = lambda self, x_ND: _even(route(self, x_ND))  # type: ignore[method-assign, assignment]
    measured = {name: _measure(rank, spec, steps) for name, spec in SPECS.items()}
    if rank == 0:
        (Path(folder) / "rounds.json").write_text(json.dumps(measured))
    dist.destroy_process_group()


def _measure(rank: int, spec: ModelSpec, steps: int) -> dict[str, list[list[float]]]:
    """Seconds by clock, round and kind."""
    plan = trial_plan(TRIAL, dp=WORLD, ep=WORLD)
    engine = build_trial(spec, plan, TRIAL, rank, torch.device("cpu"))
    optimizer, clock = build_optimizer(TRIAL.optimizer, engine.locals()), Clock(torch.device("cpu"))
    batch, num_targets = trial_batch(spec, plan, TRIAL, 1, engine.mesh.at.dp)
    rounds: dict[str, list[list[float]]] = {name: [] for name in CLOCKS}
    for number in range(steps + 1):  # one to warm up
        seconds: dict[str, Tensor] = {}
        for kind in KINDS if number % 2 else KINDS[::-1]:
            for layer in moe_layers(engine.models[0]):
                layer.forward = MixtureOfExperts.forward.__get__(layer) if kind == "dispatch" else _stay.__get__(layer)
            dist.barrier()
            began = [now() for now in CLOCKS.values()]
            norm, *_ = accumulate(engine, batch, num_targets, clock)
            update(engine, optimizer, norm, lr=1e-3, clip=1.0, clock=clock)
            seconds[kind] = torch.tensor([now() - then for now, then in zip(CLOCKS.values(), began, strict=True)])
            dist.all_reduce(seconds[kind])
        for index, name in enumerate(CLOCKS):
            rounds[name].append([float(seconds[kind][index]) / WORLD for kind in KINDS])
    return {name: found[1:] for name, found in rounds.items()}


def _even(choice: Choice) -> Choice:
    """Experts in turn: each gets the same number of rows."""
    num_rows, num_chosen = choice.experts_NK.shape
    turns = torch.arange(num_rows * num_chosen).view(num_rows, num_chosen)
    return choice._replace(experts_NK=turns % choice.logits_NE.shape[1])


def _stay(layer: Any, x_BTD: Tensor, target_counts_B: Tensor | None) -> tuple[Tensor, Any]:
    """As many rows through this rank's own experts, in the order they are in."""
    x_ND = x_BTD.flatten(0, 1)
    choice = layer.router(x_ND)
    repeated_MD = x_ND.repeat_interleave(layer.experts_per_token, 0)
    held = layer.experts.up.shape[0]
    counts_L = torch.full((held,), repeated_MD.shape[0] // held)
    out_NKD = Experts.forward(layer.experts, repeated_MD, counts_L).unflatten(0, (-1, layer.experts_per_token))
    out_BTD = (out_NKD * choice.weights_NK.to(out_NKD.dtype).unsqueeze(-1)).sum(1).view_as(x_BTD)
    return out_BTD, None if target_counts_B is None else layer._report(choice, target_counts_B)


if __name__ == "__main__":
    main()
