"""Computes the truth that layouts are measured against: the plain model, one process, torch's own optimizer and
clipping, nothing of `parallel/`.

`train_plain` trains on made-up batches and records losses, gradient norms, the first step's gradients and the final
parameters. `verify` and the parity tests compare a layout's record with this one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from shardwise.adapters.lora import adapt_whole
from shardwise.data.loader import TensorBatch, cut_microbatches, number_rows
from shardwise.data.sequences import IGNORE
from shardwise.interop.transformers.model import TransformersModel
from shardwise.interop.transformers.spec import TransformersSpec
from shardwise.kernels.flash4 import kernel_named
from shardwise.kernels.float8 import apply_float8, apply_float8_head
from shardwise.kernels.fused_head import apply_fused_head
from shardwise.model.decoder import Decoder, Losses
from shardwise.model.dtypes import COMPUTED, KEPT
from shardwise.model.experts import balancing_weights, counting_first, moe_layers, update_router_bias
from shardwise.model.initialize import initialize
from shardwise.optim.build import TakesFactor, build_optimizer
from shardwise.optim.loss_scaling import LossScaler, scaler_of, unscaled
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.precisions import PRECISIONS
from shardwise.spec.schema import AdapterConfig, Auto, OptimizerConfig

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trial:
    """A short training that shows mistakes: uneven target counts, clipping at work, several micro-batches."""

    num_steps: int = 3
    global_batch: int = 8
    micro_batch: int = 2
    seq_len: int = 16
    precision: str = "fp64"
    clip: float = 0.5
    seed: int = 0
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=1e-3))
    documents: bool = False
    attention: str = "auto"
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    through_fsdp: bool = False  # the layout takes the way of mixed precision, in the trial's own precision
    loss_scale: float | Auto = "auto"  # as `Plan.loss_scale`
    reduce_dtype: str = "auto"  # as `Plan.reduce_dtype`; one process has nothing to reduce and rounds nothing
    fp8_recipe: str = "rowwise"
    fp8_head: bool = False

    def batch(self, spec: ModelSpec, step: int) -> TensorBatch:
        """Returns the rows of a step: random tokens; some targets, and one whole row in five, have no loss."""
        draw = torch.Generator().manual_seed(1000 * self.seed + step)
        shape = (self.global_batch, self.seq_len)
        tokens = torch.randint(0, spec.vocab, shape, generator=draw)
        targets = tokens.roll(-1, 1)
        targets[torch.rand(shape, generator=draw) < 0.2] = IGNORE
        targets[step % 5 :: 5, : self.seq_len // 2] = IGNORE
        documents = None
        if self.documents:
            documents = (torch.rand(shape, generator=draw) < 0.2).cumsum(1)
        return TensorBatch(tokens, targets, documents, number_rows(step, range(self.global_batch)))


@dataclass
class Record:
    """What a training computed, to be compared with another."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)  # of the first step, before clipping
    parameters: dict[str, Tensor] = field(default_factory=dict)  # after the last step


def train_plain(spec: ModelSpec, trial: Trial, device: torch.device = CPU) -> Record:
    model = _plain_model(spec, trial).to(device)
    if PRECISIONS[trial.precision].is_fp8:
        found = apply_float8(model, model.layers.values(), trial.fp8_recipe, emulate=device.type == "cpu")
        if trial.fp8_head:
            apply_float8_head(model, found, compiled=False)
        found.quantize_frozen()
    optimizer = build_optimizer(trial.optimizer, model.parameters())
    scaler = plain_scaler(trial.precision, trial.loss_scale)
    record = Record()
    for step in range(1, trial.num_steps + 1):
        batch = trial.batch(spec, step)
        num_targets = int((batch.targets != IGNORE).sum())
        micro = [part.to(device) for part in cut_microbatches(batch, trial.micro_batch)]
        record.losses.append(plain_gradients(model, micro, num_targets, trial.precision, scaler.scale))
        if step == 1:
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            record.gradients = {name: unscaled(gradient, scaler.scale) for name, gradient in gradients.items()}
        record.norms.append(plain_update(model, optimizer, trial.clip, scaler))
    record.parameters = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    return record


def _plain_model(spec: ModelSpec, trial: Trial) -> Decoder:
    if isinstance(spec, TransformersSpec):
        model = cast(
            Decoder, TransformersModel(spec, trial.attention, KEPT[trial.precision])
        )  # it has the decoder's calls
    else:
        model = Decoder(spec, kernel_named(trial.attention)).to(KEPT[trial.precision])
        apply_fused_head(model)  # rounds where a run's head rounds, should logits not fit at once
    init_trial(model, trial)
    adapt_whole(model, trial.adapter, trial.seed, trial.precision)
    return model


def init_trial(model: Decoder, trial: Trial) -> None:
    """Gives a model the weights that every trial of this seed begins with."""
    if isinstance(model, TransformersModel):
        model.draw_from(trial.seed)
    else:
        initialize(model, trial.seed)


def plain_scaler(precision: str, loss_scale: float | Auto) -> LossScaler:
    """Returns the loss scaler that a run on one device has."""
    alone = dict(
        device="cpu", seq_len=1, global_batch=1, micro_batch=1, num_steps=1, threads_per_rank=1, reason="alone"
    )
    return scaler_of(Plan(precision=precision, loss_scale=loss_scale, **alone))  # type: ignore[arg-type]


def plain_gradients(
    model: Decoder, microbatches: Iterable[TensorBatch], num_targets: int, precision: str, scale: float = 1.0
) -> float:
    """Runs forward and backward of a step, of the loss times `scale`; returns its mean cross-entropy in nats."""
    total = 0.0
    if isinstance(model, Decoder) and model.spec.needs_counts_first:
        microbatches = list(microbatches)
        count_experts_first(model, microbatches, num_targets, precision)
    for micro in microbatches:
        losses = _forward(model, micro, precision)
        loss = torch.stack([part.to(losses.cross_entropy) for part in losses]).sum()
        (loss * scale / max(num_targets, 1)).backward()
        total += float(losses.cross_entropy.detach())
    return total / max(num_targets, 1)


def count_experts_first(model: Decoder, microbatches: Iterable[TensorBatch], num_targets: int, precision: str) -> None:
    """Runs a step's micro-batches forward only, for what transformers' balancing loss weighs their tokens with."""
    layers = moe_layers(model)
    with counting_first(layers) as weigh:
        for micro in microbatches:
            _forward(model, micro, precision)
        counts_LE = torch.stack([layer.tokens_per_expert for layer in layers])
        weigh(balancing_weights(model.spec, counts_LE, num_targets))


def plain_update(
    model: Decoder, optimizer: torch.optim.Optimizer, clip: float | None, scaler: LossScaler | None = None
) -> float:
    """Clips the gradients, updates the weights and returns the gradient norm."""
    scaler = scaler or LossScaler()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    # Of 16-bit gradients too the norm is a number in fp32: 8 bits of it would clip differently, and fp16 overflows.
    in_fp32 = [g.float() if g.dtype.itemsize == 2 else g for g in gradients]
    norm = torch.nn.utils.get_total_norm(in_fp32) / scaler.scale
    overflowed = scaler.overflowed(norm)
    if scaler.is_active and not overflowed:
        factor = (torch.clamp(clip / (norm + 1e-6), max=1.0) if clip else torch.ones_like(norm)) / scaler.scale
        if isinstance(optimizer, TakesFactor):
            optimizer.grad_factor = factor
        else:
            torch._foreach_mul_(gradients, factor)
    elif clip and not overflowed:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), clip, norm)
    if not overflowed:
        optimizer.step()
    scaler.update(overflowed=overflowed)
    optimizer.zero_grad()
    update_router_bias(model, moves=not overflowed)
    return float(norm)


def _forward(model: Decoder, micro: TensorBatch, precision: str) -> Losses:
    arguments = (micro.tokens, micro.targets, None, micro.documents, None, None, micro.row_numbers)
    if COMPUTED[precision] == KEPT[precision]:
        return model(*arguments)
    # Mixed precision by its definition: low-precision weights made of fp32 parameters, whose gradients arrive in fp32.
    low_precision = {name: p.to(COMPUTED[precision]) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, low_precision, arguments)
