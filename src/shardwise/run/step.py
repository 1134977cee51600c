"""Makes one optimizer step: gradient accumulation, the sum over ranks, gradient clipping, the update.

The sum rule: a micro-batch's loss is its token *sum* over the step's *global* target-token count, which is known before
the first forward pass. Then gradients only ever need adding, over micro-batches and over ranks, and any split of the
same batch gives the same step.

On a GPU a step is only queued by `start_step`. Nothing in it waits for the device, unless its update depends on the
norm being finite (fp16, `on_nan=skip`): then all ranks decide by one number, which is of all of them. Its results may
be read when more is queued behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from shardwise.data.loader import StepBatch
from shardwise.optim.build import TakesFactor, set_learning_rate
from shardwise.parallel.engine import Engine
from shardwise.run.clock import Clock

Ask = Callable[[], Sequence[int]]
"""Called when a step's gradients are complete. Returns small numbers to be added up over all ranks, in the all-reduce
that carries the norm and the losses anyway."""


@dataclass(frozen=True)
class StepResult:
    """What a step computed, over all ranks."""

    loss: float  # global mean cross-entropy over the step's target tokens, in nats
    aux_loss: float
    z_loss: float
    grad_norm: float
    scale: float = 1.0  # the loss scale with which this step was computed
    skipped: bool = False  # whether the update was left out, because something was not finite
    answers: list[int] = field(default_factory=list)  # what `ask` returned, summed over all ranks
    added: list[float] = field(default_factory=list)  # what else was added up over all ranks
    expert_tokens: list[list[float]] = field(default_factory=list)  # tokens per expert, for every routed layer


@dataclass(frozen=True)
class StartedStep:
    """A step that has been computed, or on a GPU queued."""

    num_targets: int
    scale: float
    skipped: bool
    num_answers: int
    num_added: int
    shape_of_experts: tuple[int, ...]
    values: Callable[[], list[float]]  # waits for the device: norm, losses, answers, tokens of experts

    def read(self) -> StepResult:
        norm, cross_entropy, aux, z, *rest = self.values()
        targets = max(self.num_targets, 1)
        answers = [round(answer) for answer in rest[: self.num_answers]]
        added, counts = rest[self.num_answers :][: self.num_added], rest[self.num_answers + self.num_added :]
        tokens = torch.tensor(counts, dtype=torch.float64).view(self.shape_of_experts).tolist()
        losses = (cross_entropy / targets, aux / targets, z / targets)
        return StepResult(*losses, norm, self.scale, self.skipped, answers, added, tokens)


def run_step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    batch: StepBatch,
    *,
    num_targets: int,
    lr: float,
    clip: float | None,
    clock: Clock,
    skip_non_finite: bool = False,
    ask: Ask = lambda: (),
) -> StepResult:
    """Makes a step (`start_step`), waits for it and returns its results."""
    return start_step(
        engine,
        optimizer,
        batch,
        num_targets=num_targets,
        lr=lr,
        clip=clip,
        clock=clock,
        skip_non_finite=skip_non_finite,
        ask=ask,
    ).read()


def start_step(
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
    added: torch.Tensor | None = None,  # fp64 on the engine's device, to be added up over all ranks as well
) -> StartedStep:
    scale, num_added = engine.scaler.scale, 0 if added is None else len(added)
    agreed = skip_non_finite or engine.scaler.is_active
    norm, finish = accumulate(engine, batch, num_targets, clock, ask, added, agreed=agreed)
    skip = skip_non_finite and not bool((norm + finish()[0]).isfinite())  # of all ranks, on every rank
    skip = update(engine, optimizer, norm, lr=lr, clip=clip, clock=clock, skip=skip)
    with clock.span("optimizer", "losses"):
        sums, experts = finish(), engine.expert_counts
        agreed_norm = engine.squared_norm.sqrt() / scale  # a whole replica's own might be damaged on its rank alone
        parts = [agreed_norm.view(1), sums, *([experts.flatten()] if experts.numel() else [])]
        values = to_host(torch.cat(parts))
    return StartedStep(num_targets, scale, skip, len(sums) - 3 - num_added, num_added, experts.shape, values)


def to_host(values: torch.Tensor) -> Callable[[], list[float]]:
    """Returns a function that returns these values. From a GPU they are copied behind what was queued so far, and only
    the call waits: for this copy, not for what is queued later."""
    if not values.is_cuda:
        return values.tolist
    here = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    here.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event(blocking=True)
    arrived.record()

    def read() -> list[float]:
        arrived.synchronize()
        return here.tolist()

    return read


def accumulate(
    engine: Engine,
    batch: StepBatch,
    num_targets: int,
    clock: Clock,
    ask: Ask = lambda: (),
    added: torch.Tensor | None = None,
    *,
    agreed: bool = False,
) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """Runs forward and backward of every micro-batch. Returns the global gradient norm, and a function that returns the
    loss sums, the answers and what is `added` over all ranks. `agreed`: as `Engine.norm_and_sums` has it."""
    micro = [micro.to(engine.mesh.device) for micro in batch.microbatches]
    sums = engine.gradients(micro, num_targets, clock)
    if asked := ask():
        questions = torch.tensor(asked, dtype=torch.float64, pin_memory=sums.is_cuda)
        sums = torch.cat([sums, questions.to(sums.device, non_blocking=True)])
    if added is not None:
        sums = torch.cat([sums, added])
    with clock.span("optimizer", "norm and loss"):
        return engine.norm_and_sums(sums, agreed=agreed)


def find_overflow(engine: Engine, batch: StepBatch, num_targets: int, clock: Clock) -> str:
    """Collective. Returns, in words, where a step overflows whose update was passed over: it is computed once more."""
    micro = [micro.to(engine.mesh.device) for micro in batch.microbatches]
    found = engine.first_overflow(micro, num_targets, clock)
    return str(found) if found else "the square of a gradient's norm"


def update(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    norm: torch.Tensor,
    *,
    lr: float,
    clip: float | None,
    clock: Clock,
    skip: bool = False,
) -> bool:
    """Applies the step's gradients, unless something overflowed; returns whether they were passed over.

    Clipping and the loss scale are one factor, and this is the only place that applies it.
    """
    with clock.span("optimizer", "clip and update"):
        overflowed = engine.scaler.overflowed(norm)
        skip = skip or overflowed
        set_learning_rate(optimizer, lr)
        if not skip:
            factor = engine.factor(norm, clip)
            if isinstance(optimizer, TakesFactor):
                optimizer.grad_factor = factor
            elif factor is not None:
                engine.multiply(factor)
            optimizer.step()
        engine.zero_grad()
        engine.scaler.update(overflowed=overflowed)
    if engine.spec.num_experts:
        with clock.span("optimizer", "balance experts"):
            engine.balance_experts(moves=not skip)
    return skip
