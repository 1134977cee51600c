"""Watches one step of the real engine: what every demo of a layout needs.

The engine is built and stepped as `verify` does it. A step goes before the one that counts: from then on gloo has its
connections and the optimizer its state. (DDP begins its second step with two small broadcasts, to agree on the order of
its buckets.)
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardwise.demo.wire import PhaseClock, Wire, WireOperation, sent_bytes
from shardwise.model.initialize import initialize
from shardwise.optim.build import build_optimizer
from shardwise.parallel.apply import parallelize_decoder
from shardwise.parallel.engine import Engine
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import train_in_layout, trial_batch, trial_plan
from shardwise.prove.verify import compare
from shardwise.run.clock import Clock, Span
from shardwise.run.step import accumulate, update
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

CPU = torch.device("cpu")
SPEC = preset("tiny").with_overrides(
    {"num_layers": 4, "hidden": 64, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16, "ffn": 128, "vocab": 128}
)
"""A small model. Every size divides by four: nothing is padded, so formulas are exact."""

Look = Callable[[Engine, torch.optim.Optimizer], None]


@dataclass
class Observed:
    """One rank's step. `transfers` leaves out the all-reduce that carries norm and losses; `sent` is the system's count
    of all bytes."""

    engine: Engine
    transfers: list[WireOperation] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    began_s: float = 0.0
    sent: int | None = None
    loss: float = 0.0


def observe_step(
    trial: Trial,
    rank: int,
    *,
    prepare: Look | None = None,
    look: Look | None = None,
    spec: ModelSpec = SPEC,
    **layout: Any,
) -> Observed:
    """Collective. Makes two steps and returns what was seen of the second. `prepare` is called before it, `look`
    between its backward and its update."""
    plan = trial_plan(trial, **layout)
    engine = parallelize_decoder(spec, plan, rank, CPU, "auto", lambda model: initialize(model, trial.seed))
    optimizer = build_optimizer(trial.optimizer, engine.locals())
    seen, wire, clock = Observed(engine), Wire(), Clock(CPU)
    for step in (1, 2):
        batch, num_targets = trial_batch(spec, plan, trial, step, engine.mesh.at.dp)
        if step == 2:
            if prepare:
                prepare(engine, optimizer)
            dist.barrier()
            clock, before = PhaseClock(wire), sent_bytes()
            with wire:
                norm, finish = accumulate(engine, batch, num_targets, clock)
                sums = finish()
            time.sleep(0.02)  # let the system send what it has been given
            after = sent_bytes()
            seen.sent = None if before is None or after is None else after - before
            seen.loss = float(sums[0]) / num_targets
            if look:
                look(engine, optimizer)
        else:
            norm, *_ = accumulate(engine, batch, num_targets, clock)
        update(engine, optimizer, norm, lr=trial.optimizer.peak_lr, clip=trial.clip, clock=Clock(CPU))
    seen.transfers = [transfer for transfer in wire.transfers if transfer.phase != "norm and loss"]
    seen.spans, seen.began_s = clock.spans, clock.start
    return seen


def truth_of(trial: Trial, rank: int, spec: ModelSpec = SPEC) -> Record | None:
    """Returns what one process computes; rank 0 does it, for all layouts of this trial, and other ranks get None."""
    return train_plain(spec, trial) if rank == 0 else None


def difference(trial: Trial, truth: Record | None, rank: int, spec: ModelSpec = SPEC, **layout: Any) -> float:
    """Collective. Returns the largest difference of losses, norms, gradients and parameters from one process; 0 on
    other ranks than the first."""
    record = train_in_layout(spec, trial_plan(trial, **layout), trial, rank, CPU)
    return max(compare(record, truth)[0]) if truth else 0.0
