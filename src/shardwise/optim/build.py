"""Builds optimizers by name. Weight decay falls on matrices only: norms, biases and other vectors are left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from shardwise.optim.fused_adamw import MasterAdamW, can_update
from shardwise.optim.low_bit import adamw8bit
from shardwise.optim.master_weights import LowPrecisionOf, MasterWeights
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.schema import OptimizerConfig

Builder = Callable[[OptimizerConfig, list[dict[str, Any]]], torch.optim.Optimizer]


@runtime_checkable
class TakesFactor(Protocol):
    """An optimizer that multiplies gradients itself, in a wider format than theirs or in another place."""

    grad_factor: Tensor | None  # what the next step multiplies gradients by


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter], low_precision_of: LowPrecisionOf = MappingProxyType({})
) -> torch.optim.Optimizer:
    """Returns the optimizer that a config names, over the parameters that are trained. `low_precision_of` has the
    16-bit weights that its update must write too, by master weight."""
    trained = [p for p in parameters if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:  # a stage may be frozen as a whole; torch wants something to do
        groups = [{"params": [nn.Parameter(torch.empty(0))], "weight_decay": 0.0}]
    if low_precision_of and OPTIMIZERS[config.name].has_kernel and can_update(trained[0]):
        build = adamw8bit if OPTIMIZERS[config.name].is_low_bit else MasterAdamW
        return build(groups, config.peak_lr, config.betas, config.eps, low_precision_of)
    if low_precision_of or any(p.dtype == torch.float16 for p in trained):
        return MasterWeights(groups, lambda masters: _build(config, masters), low_precision_of)
    return _build(config, groups)


def _build(config: OptimizerConfig, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return BUILDERS[config.name](config, groups)


def _adam(build: Any) -> Builder:
    return lambda config, groups: build(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps, fused=True)


# The fused kernels make one pass over memory instead of one per operation; torch has them for CPU and CUDA.
BUILDERS: dict[str, Builder] = {
    "adamw": _adam(torch.optim.AdamW),
    "adam": _adam(torch.optim.Adam),
    "sgd": lambda config, groups: torch.optim.SGD(groups, lr=config.peak_lr, fused=True),
    "momentum": lambda config, groups: torch.optim.SGD(groups, lr=config.peak_lr, momentum=config.betas[0], fused=True),
    "adagrad": lambda config, groups: torch.optim.Adagrad(groups, lr=config.peak_lr, eps=config.eps),
    "rmsprop": lambda config, groups: torch.optim.RMSprop(
        groups, lr=config.peak_lr, alpha=config.betas[0], eps=config.eps
    ),
    "adamw8bit": lambda config, groups: adamw8bit(groups, config.peak_lr, config.betas, config.eps),
}
"""A constructor for every record of `spec/optimizers.py`."""


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups of parameters, from the next update on: the same one, but for groups of a
    program's own optimizer that have an `lr_scale`."""
    for group in optimizer.param_groups:
        rate = lr * group.get("lr_scale", 1.0)
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)  # torchao's kernels are compiled around the tensor
        else:
            group["lr"] = rate
