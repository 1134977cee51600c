"""The proof of a run: its first steps once more, in one process, without any parallelism."""

from __future__ import annotations

import torch

from shardwise.config.schema import Config
from shardwise.data.corpus import Corpus
from shardwise.data.loader import Loader
from shardwise.model.spec import ModelSpec
from shardwise.parallel.data import Replicas
from shardwise.plan.plan import Plan
from shardwise.run.build import build_model
from shardwise.run.calibrate import DTYPES
from shardwise.run.clock import Clock
from shardwise.run.optimizer import build_optimizer
from shardwise.run.schedule import learning_rate
from shardwise.run.step import run_step

NUM_STEPS = 3


def single_process_losses(
    config: Config, plan: Plan, spec: ModelSpec, corpus: Corpus, device: torch.device, num_steps: int = NUM_STEPS
) -> list[float]:
    """Losses of steps 1 … num_steps when one process computes every row of every batch."""
    model = build_model(config.model, spec, config.train.seed, DTYPES[plan.precision], device)
    replicas = Replicas(model, 0, distributed=False)
    optimizer = build_optimizer(config.optimizer, model)
    rate = learning_rate(config.optimizer, plan.num_steps, plan.global_batch)
    rows = range(plan.global_batch)
    loader = Loader(corpus.train, global_batch=plan.global_batch, rows=rows, micro_batch=plan.micro_batch)
    clock = Clock(device)
    losses = []
    for step in range(1, num_steps + 1):
        batch = loader.next()
        result = run_step(
            replicas,
            optimizer,
            batch,
            num_targets=batch.num_targets,
            lr=rate(step),
            clip=config.train.clip,
            clock=clock,
            device=device,
        )
        losses.append(result.loss)
        clock.begin()
    loader.close()
    return losses
