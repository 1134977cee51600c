"""Runs on ranks: three steps in a layout, the first two of them watched or not, and what the account saw."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.memory.account import Account
from shardwise.memory.points import Point
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.clock import Clock
from shardwise.run.memory_owners import owners_of
from shardwise.run.step import accumulate, update
from shardwise.spec.model import ModelSpec


@dataclass(frozen=True)
class Seen:
    losses: list[float]
    parameters: str  # a digest of the bits
    first: dict[str, int]
    last: dict[str, int]
    peak: dict[str, int]
    fullest: dict[str, int]
    points: list[tuple[float, dict[str, int]]]  # of the second step
    largest_block: int  # parameters


def watch_layouts(
    spec: ModelSpec, trial: Trial, layouts: list[dict[str, Any]], device: str = "cpu"
) -> list[list[Seen]]:
    """Each layout plain and watched."""
    return [[three_steps(spec, trial, layout, watched, device) for watched in (False, True)] for layout in layouts]


def three_steps(spec: ModelSpec, trial: Trial, layout: dict[str, Any], watched: bool, where: str) -> Seen:
    device = torch.device(where)
    plan = trial_plan(trial, **layout)
    engine = build_trial(spec, plan, trial, dist.get_rank() if dist.is_initialized() else 0, device)
    optimizer = engine.optimizer(trial.optimizer)
    clock, losses = Clock(device), []
    account = Account(device, owners_of(engine, optimizer), clock)
    first, last, points = dict(account.held), dict(account.held), list[Point]()
    for step in (1, 2, 3):
        batch, num_targets = trial_batch(spec, plan, trial, step, engine.mesh.at.dp)
        clock.begin()
        if watched and step < 3:
            account.label(everything=True)
            account.records = step == 2
            account.begin()
            with account:
                losses.append(_step(engine, optimizer, batch, num_targets, clock))
            if step == 2:
                first, last, points = account.first.by_category(), dict(account.held), list(account.points)
        else:
            losses.append(_step(engine, optimizer, batch, num_targets, clock))
    bits = b"".join(shard.value.cpu().numpy().tobytes() for shard in engine.shards)
    blocks = [sum(p.numel() for p in block.parameters()) for model in engine.models for block in model.layers.values()]
    return Seen(
        losses=losses,
        parameters=hashlib.sha256(bits).hexdigest(),
        first=first,
        last=last,
        peak=account.peak.by_category(),
        fullest=account.fullest(),
        points=[(point.at, point.by_category()) for point in points],
        largest_block=max(blocks),
    )


def _step(engine: Any, optimizer: Any, batch: Any, num_targets: int, clock: Clock) -> float:
    norm, finish = accumulate(engine, batch, num_targets, clock)
    loss = float(finish()[0])
    update(engine, optimizer, norm, lr=1e-3, clip=0.5, clock=clock)
    return loss
