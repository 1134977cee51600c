"""One optimizer step: accumulate, sum, clip, update.

The sum rule: a micro-batch's loss is its token *sum* over the step's *global* target-token count, which is known before the
first forward pass. Then gradients only ever need adding, over micro-batches and over ranks, and any split of the same
batch gives the same step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.data.loader import StepBatch
from shardwise.parallel.engine import Engine
from shardwise.run.clock import Clock
from shardwise.run.optimizer import TakesFactor, set_learning_rate

Ask = Callable[[], Sequence[int]]
"""Called when a step's gradients are complete: small numbers to be added up over all ranks, in the message that carries the
norm and the losses anyway."""


@dataclass(frozen=True)
class StepResult:
    loss: float  # global mean cross-entropy over the step's target tokens
    aux_loss: float
    z_loss: float
    grad_norm: float
    skipped: bool = False
    answers: list[int] = field(default_factory=list)  # what `ask` returned, summed over all ranks
    expert_tokens: list[list[float]] = field(default_factory=list)  # of every routed layer, over all ranks


def run_step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    *,
    num_targets: int,  # of the whole step, over all ranks
    lr: float,
    clip: float | None,
    clock: Clock,
    skip_non_finite: bool = False,
    ask: Ask = lambda: (),
) -> StepResult:
    norm, finish = accumulate(engine, batch, num_targets, clock, ask)
    skip = skip_non_finite and not bool(torch.isfinite(norm))
    update(engine, optimizer, norm, lr=lr, clip=clip, clock=clock, skip=skip)
    with clock.span("optimizer", "losses"):
        cross_entropy, aux, z, *answers = finish().tolist()
    targets = max(num_targets, 1)
    losses = (cross_entropy / targets, aux / targets, z / targets)
    asked = [round(answer) for answer in answers]
    return StepResult(*losses, float(norm), skip, asked, engine.expert_counts.tolist())


def accumulate(
    engine: Engine, batch: StepBatch, num_targets: int, clock: Clock, ask: Ask = lambda: ()
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Forward and backward of every micro-batch; the global gradient norm, and later the loss sums and the answers over all ranks."""
    micro = [micro.to(engine.mesh.device) for micro in batch.microbatches]
    sums = engine.gradients(micro, num_targets, clock)
    questions = torch.tensor(ask(), dtype=torch.float64).to(sums.device, non_blocking=True)
    with clock.span("optimizer", "norm and loss"):
        return engine.norm_and_sums(torch.cat([sums, questions]))


def update(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    norm: torch.Tensor,
    *,
    lr: float,
    clip: float | None,
    clock: Clock,
    skip: bool = False,
) -> None:
    with clock.span("optimizer", "clip and update"):
        set_learning_rate(optimizer, lr)
        if not skip:
            factor = engine.factor(norm, clip)
            if isinstance(optimizer, TakesFactor):
                optimizer.grad_factor = factor
            elif factor is not None:
                engine.multiply(factor)
            optimizer.step()
        engine.zero_grad()
    if engine.spec.num_experts:
        with clock.span("optimizer", "balance experts"):
            engine.balance_experts()
