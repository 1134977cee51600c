"""Our side: the engine and the step that `shardwise train` runs, with its clock and its agreement of the ranks; and
`parallelize`, which takes the model as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from peers.setting import Batch, Done, Setting, Step
from shardwise.data.loader import StepBatch, TensorBatch
from shardwise.model.initialize import initialize
from shardwise.optim.build import build_optimizer
from shardwise.parallel.any_module.parallelize import parallelize
from shardwise.parallel.apply import parallelize_decoder
from shardwise.run.clock import Clock
from shardwise.run.step import run_step
from shardwise.spec.plan import Plan
from shardwise.spec.schema import OptimizerConfig


def parallelized(setting: Setting, *, zero: int) -> Step:
    split = parallelize(setting.new_model(), f"dp={setting.ranks} zero={zero}", blocks=setting.blocks)
    optimizer = setting.new_optimizer(split)

    def loss(model: Callable[..., Any], micro: Batch) -> tuple[torch.Tensor, int]:
        tokens_BT, targets_BT = micro
        return model(tokens_BT, targets_BT).cross_entropy, targets_BT.numel()

    def step(batch: list[Batch]) -> Done:
        done = split.gradients(batch, loss, clip=setting.clip)
        optimizer.step()
        return Done(done.loss, torch.tensor(done.norm))

    return step


def ours(setting: Setting, *, zero: int, bucket: int | str = "auto") -> Step:
    device = torch.device("cpu")
    plan = Plan(
        device="cpu",
        precision="fp32",
        seq_len=setting.seq_len,
        global_batch=setting.ranks * setting.rows * setting.micro_batches,
        micro_batch=setting.rows,
        num_steps=1,
        threads_per_rank=torch.get_num_threads(),
        reason="a benchmark",
        dp=setting.ranks,
        zero=zero,
        bucket=bucket,
    )
    engine = parallelize_decoder(
        setting.spec,
        plan,
        dist.get_rank(),
        device,
        "auto",
        lambda model: initialize(model, setting.seed),
    )
    values = OptimizerConfig(lr=setting.lr, betas=setting.betas, eps=setting.eps, weight_decay=setting.weight_decay)
    optimizer, clock = build_optimizer(values, engine.locals()), Clock(device)

    def step(batch: list[Batch]) -> Done:
        clock.begin()
        # The loop's agreement with every step: whether to stop, the number of the next step's targets, whether to save.
        own_targets = sum(targets.numel() for _, targets in batch)
        micro = [TensorBatch(tokens, targets, None) for tokens, targets in batch]
        done = run_step(
            engine,
            optimizer,
            StepBatch(1, micro, 0),
            num_targets=setting.ranks * own_targets,
            lr=setting.lr,
            clip=setting.clip,
            clock=clock,
            ask=lambda: [0, 0, own_targets, 0],
        )
        clock.finish()
        return Done(done.loss, torch.tensor(done.grad_norm))

    return step
