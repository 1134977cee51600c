"""Puts a layout to the test: the same short training as reference.py, through the engine and the step that real runs
use."""

from __future__ import annotations

import torch

from shardwise.data.loader import StepBatch, cut_microbatches
from shardwise.data.sequences import IGNORE
from shardwise.optim.loss_scaling import unscaled
from shardwise.parallel.apply import parallelize_decoder
from shardwise.parallel.collect import Values, collect
from shardwise.parallel.engine import Engine
from shardwise.prove.reference import Record, Trial, init_trial
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan


def trial_plan(trial: Trial, **layout: object) -> Plan:
    """Returns a plan for a trial; `layout` holds degrees as in `Plan`."""
    return Plan(
        device="cpu",
        precision=trial.precision,
        loss_scale=trial.loss_scale,
        reduce_dtype=trial.reduce_dtype,
        fp8_recipe=trial.fp8_recipe,
        fp8_head=trial.fp8_head,
        seq_len=trial.seq_len,
        global_batch=trial.global_batch,
        micro_batch=trial.micro_batch,
        num_steps=trial.num_steps,
        threads_per_rank=1,
        reason="a trial",
        **layout,  # type: ignore[arg-type]
    )


def build_trial(spec: ModelSpec, plan: Plan, trial: Trial, rank: int, device: torch.device) -> Engine:
    return parallelize_decoder(
        spec,
        plan,
        rank,
        device,
        trial.attention,
        lambda model: init_trial(model, trial),
        adapter=trial.adapter,
        seed=trial.seed,
        through_fsdp=trial.through_fsdp,
    )


def trial_batch(spec: ModelSpec, plan: Plan, trial: Trial, step: int, dp_index: int) -> tuple[StepBatch, int]:
    """Returns this data-parallel rank's micro-batches, and the number of targets in the whole step."""
    whole, rows = trial.batch(spec, step), plan.rows(dp_index)
    part = whole.rows(rows.start, rows.stop)
    micro = cut_microbatches(part, plan.micro_batch, plan.num_microbatches, plan.pp > 1)
    return StepBatch(step, micro, int((part.targets != IGNORE).sum())), int((whole.targets != IGNORE).sum())


def _first_gradient(scale: float) -> Values:
    return lambda shard: {} if shard.gradient is None else {shard.name: unscaled(shard.gradient, scale)}


def train_in_layout(spec: ModelSpec, plan: Plan, trial: Trial, rank: int, device: torch.device) -> Record:
    """Collective. Trains and returns what was computed. It is complete on rank 0; other ranks have the losses and
    norms."""
    engine = build_trial(spec, plan, trial, rank, device)
    optimizer = engine.optimizer(trial.optimizer)
    clock, record = Clock(device), Record()
    for step in range(1, trial.num_steps + 1):
        batch, num_targets = trial_batch(spec, plan, trial, step, engine.mesh.at.dp)
        norm, finish = accumulate(engine, batch, num_targets, clock)
        record.losses.append(float(finish()[0]) / num_targets)
        record.norms.append(float(norm))
        if step == 1:
            record.gradients = collect(engine, _first_gradient(engine.scaler.scale))
        update(engine, optimizer, norm, lr=trial.optimizer.peak_lr, clip=trial.clip, clock=clock)
    record.parameters = collect(engine, lambda s: {s.name: s.value.clone()} if s.local.requires_grad else {})
    return record
