"""Takes functions of a program into a run: what they raise is answered with their line, and what they return is looked
at where it comes from. No torch at module level."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any

from shardwise.errors import UserError, in_part_of_program
from shardwise.run.own_parts import Loss, Score
from shardwise.terminal import type_of

if TYPE_CHECKING:
    import torch

MakeOptimizer = Callable[[list["torch.nn.Parameter"]], "torch.optim.Optimizer"]
Evaluate = Callable[[Score], Mapping[str, float]]

TAKEN = ("step", "loss", "eval_loss", "event", "wall_time")
"""What a line of metrics.jsonl calls by these names is not found by a program's evaluation."""


def own_loss(function: Loss) -> Loss:
    """Returns a loss of a program that answers for itself."""
    return partial(_loss, function)


def _loss(function: Loss, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    import torch

    with in_part_of_program("loss"):
        found = function(logits, targets)
    if not isinstance(found, torch.Tensor) or found.shape != targets.shape:
        is_tensor = isinstance(found, torch.Tensor)
        raise UserError(
            f"loss returned {f'a tensor of shape {tuple(found.shape)}' if is_tensor else type_of(found)}",
            why=f"of logits {tuple(logits.shape)} and targets {tuple(targets.shape)}, it is one loss per token",
            fix='cross_entropy(logits, targets, reduction="none"): shardwise adds up and divides by the targets',
        )
    if torch.is_grad_enabled() and logits.requires_grad and not found.requires_grad:
        raise UserError(
            "loss returned a tensor without a gradient",
            why="it was detached from the logits, or computed under no_grad or from plain numbers",
            fix="compute it from `logits` with torch's functions",
        )
    return found


def own_optimizer(function: MakeOptimizer) -> MakeOptimizer:
    """Returns a function that makes the program's optimizer and answers for itself. The learning rate is the config's;
    groups of parameters with smaller ones keep their share of it."""
    return partial(_optimizer, function)


def _optimizer(function: MakeOptimizer, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    import torch

    with in_part_of_program("optimizer"):
        found = function(parameters)
    if not isinstance(found, torch.optim.Optimizer):
        raise UserError(
            f"optimizer returned {type_of(found)}",
            why="it is given the parameters and returns an optimizer of torch",
            fix="optimizer=lambda parameters: torch.optim.AdamW(parameters)",
        )
    if isinstance(found, torch.optim.LBFGS):
        raise UserError(
            "optimizer returned LBFGS, which computes losses itself",
            why="a step has computed its loss and gradients, over all ranks, before the optimizer is called",
            fix="an optimizer whose step() takes no closure",
        )
    rates = [float(group["lr"]) for group in found.param_groups]
    for group, rate in zip(found.param_groups, rates, strict=True):
        if rate != max(rates):
            group["lr_scale"] = rate / max(rates)
    return found


def own_evaluate(function: Evaluate) -> Evaluate:
    """Returns an evaluation of a program that answers for itself."""
    return partial(_evaluate, function)


def _evaluate(function: Evaluate, score: Score) -> dict[str, float]:
    with in_part_of_program("evaluate"):
        found: Any = function(score)
    fix = 'return {"accuracy": 0.5}'
    if not isinstance(found, Mapping):
        raise UserError(f"evaluate returned {type_of(found)}", why="it returns numbers by name", fix=fix)
    numbers = {}
    for name, value in found.items():
        if not isinstance(name, str) or name in TAKEN:
            why = f"metrics.jsonl has lines with {', '.join(TAKEN)} of its own, and names are texts"
            raise UserError(f"evaluate calls a number {name!r}", why=why, fix="another name")
        if getattr(value, "ndim", None) == 0:  # a tensor, or a number of numpy
            value = value.item()
        if not isinstance(value, Real):
            raise UserError(
                f"evaluate returned {type_of(value)} for {name!r}", why="it returns numbers by name", fix=fix
            )
        numbers[name] = float(value)
    return numbers
