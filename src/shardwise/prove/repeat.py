"""The proof of a run: its first steps once more, in one process, without anything of `parallel/`."""

from __future__ import annotations

import torch

from shardwise.data.corpus import Corpus
from shardwise.data.loader import Loader
from shardwise.interop.transformers.model import TransformersModel
from shardwise.kernels.float8 import apply_float8, apply_float8_head
from shardwise.model.dtypes import KEPT
from shardwise.optim.build import build_optimizer, set_learning_rate
from shardwise.optim.schedule import learning_rate
from shardwise.prove.reference import plain_gradients, plain_scaler, plain_update
from shardwise.run.build import adapted_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

NUM_STEPS = 3


def single_process_losses(
    config: Config, plan: Plan, spec: ModelSpec, corpus: Corpus, device: torch.device, num_steps: int = NUM_STEPS
) -> list[float]:
    """Losses of steps 1 … num_steps when one process computes every row of every batch."""
    model = adapted_model(config, spec, plan.precision, KEPT[plan.precision], device)
    if plan.precision == "fp8":
        blocks = model.blocks() if isinstance(model, TransformersModel) else model.layers.values()
        found = apply_float8(model, blocks, plan.fp8_recipe, emulate=device.type == "cpu", joined=plan.fuse)
        if plan.fp8_head:
            apply_float8_head(model, found, compiled=False)
        found.round_frozen()
    optimizer = build_optimizer(config.optimizer, model.parameters())
    scaler = plain_scaler(plan.precision, plan.loss_scale)
    rate = learning_rate(config.optimizer, plan.num_steps, plan.global_batch)
    rows, losses = range(plan.global_batch), []
    with Loader(corpus.train, global_batch=plan.global_batch, rows=rows, micro_batch=plan.micro_batch) as loader:
        for step in range(1, num_steps + 1):
            batch = loader.next()
            micro = (part.to(device) for part in batch.microbatches)
            losses.append(plain_gradients(model, micro, batch.num_targets, plan.precision, scaler.scale))
            set_learning_rate(optimizer, rate(step))
            plain_update(model, optimizer, config.train.clip, scaler)
    return losses
