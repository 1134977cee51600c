"""Finds where fp16 overflows: the first tensor of a step that is not finite, and the layer that made it.

A step that overflowed is run once more with hooks on every module. What is not finite first, in the order of
computation, is the cause; all that follows is infected. Invariant: the pass changes no weight, and every rank takes
part in it, whether it finds something or not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

FORWARD, BACKWARD, SUMS = 0, 1, 2
TEXT_BYTES = 512  # bytes of the text on what a rank found: all ranks exchange texts of one length


@dataclass(frozen=True, order=True)
class Overflow:
    """Something that was not finite. Ordered by time: forward goes up the stages, backward down, then gradients are
    summed."""

    phase: int
    stage: int  # its number, negative in backward passes, which go down the stages
    order: int
    what: str

    def __str__(self) -> str:
        during = ("in forward", "in backward", "where it is added up")[self.phase]
        return f"{self.what}, {during}"


def first_overflow(
    models: Sequence[tuple[int, nn.Module]],
    compute: Callable[[], object],
    gradients: Callable[[], Iterable[tuple[str, Tensor]]],
    device: torch.device,
    world: int,
) -> Overflow | None:
    """Collective. Returns the earliest overflow of all ranks, or None. `models` are the stages of this rank, by number;
    `compute` does forward and backward of the step; `gradients` gives what came out of it, by name."""
    found: list[Overflow] = []

    def note(phase: int, stage: int, what: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.is_floating_point() and not bool(torch.isfinite(value).all()):
            found.append(Overflow(phase, stage, len(found), what))

    with ExitStack() as hooks:
        for stage, model in models:
            for name, module in model.named_modules():
                if name:
                    _watch(hooks, stage, name, module, note)
        compute()
    for name, gradient in gradients():
        note(SUMS, 0, f"the gradient of {name}", gradient)
    return _earliest(min(found, default=None), device, world)


def _watch(
    hooks: ExitStack, stage: int, name: str, module: nn.Module, note: Callable[[int, int, str, Any], None]
) -> None:
    def entered(module: nn.Module, args: tuple[Any, ...]) -> None:
        for value in args:
            if isinstance(value, Tensor) and value.requires_grad:  # a mask may hold -inf
                note(FORWARD, stage, f"what enters {name}", value)

    def left(module: nn.Module, args: Any, output: Any) -> None:
        for value in output if isinstance(output, tuple) else (output,):
            note(FORWARD, stage, f"the output of {name}", value)
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(
                    lambda gradient: note(BACKWARD, -stage, f"the gradient of {name}'s output", gradient)
                )

    for hook in (module.register_forward_pre_hook(entered), module.register_forward_hook(left)):
        hooks.callback(hook.remove)


def _earliest(mine: Overflow | None, device: torch.device, world: int) -> Overflow | None:
    """Collective. Returns the first in time of what all ranks found. Names are short texts of one length: nothing is
    pickled."""
    if world == 1:
        return mine
    text = json.dumps(astuple(mine) if mine else None).encode()[:TEXT_BYTES].ljust(TEXT_BYTES)
    mine_encoded = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    encoded = [torch.empty_like(mine_encoded) for _ in range(world)]
    dist.all_gather(encoded, mine_encoded)
    found = [json.loads(bytes(one.tolist())) for one in encoded]
    return min((Overflow(*fields) for fields in found if fields), default=None)
