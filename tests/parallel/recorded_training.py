"""A short training of which every collective is noted; run as a program, one rank of several that share one device.

python recorded_training.py RANK WORLD STORE DEVICE '{"dp": 2}'      prints what `recorded` returns, as JSON
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.presets import preset

SPEC = preset("tiny").with_overrides(
    {"num_layers": 3, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
)
TRIAL = Trial(attention="math")


def recorded(layout: dict[str, Any], trial: Trial, device: str) -> dict[str, Any]:
    """Collective. Trains in a layout and returns losses, gradient norms, and how often each collective was waited for:
    name, axis and bytes."""
    plan, at = trial_plan(trial, **layout), torch.device(device)
    engine = build_trial(SPEC, plan, trial, dist.get_rank(), at)
    optimizer, clock = engine.optimizer(trial.optimizer), Clock(at)
    losses, norms, waits = [], [], Counter[str]()
    for step in range(1, trial.num_steps + 1):
        clock.begin()
        batch, num_targets = trial_batch(SPEC, plan, trial, step, engine.mesh.at.dp)
        norm, finish = accumulate(engine, batch, num_targets, clock)
        losses.append(float(finish()[0]) / num_targets)
        norms.append(float(norm))
        update(engine, optimizer, norm, lr=trial.optimizer.peak_lr, clip=trial.clip, clock=clock)
        spans = [span for span in clock.spans if span.kind == "comm_exposed"]
        waits.update(f"{span.name} over {span.group}, {span.num_bytes} bytes" for span in spans)
    return {"losses": losses, "norms": norms, "waits": dict(waits)}


def main(rank: int, world: int, store: str, device: str, layout: str) -> None:
    """Trains as one rank. gloo takes tensors of either device."""
    torch.set_num_threads(1)
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.zeros(1, device=device)  # torch gives each rank a GPU of its own unless CUDA is in use already
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    found = recorded(json.loads(layout), TRIAL, device)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
