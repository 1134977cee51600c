"""This is an optimizer whose state is not beside the model: what all kinds of offload have in common (ZeRO-Offload,
ZeRO-Infinity).

Owns the cut of a rank's parameters into groups that are updated one after the other, each by an optimizer of torch's
own. The class here updates parameters that are in CPU memory anyway, in place: nothing is copied. cpu.py and nvme.py
move things. Invariant: from outside this is a torch optimizer over `shard.local`, and `state[shard.local]` is that
parameter's state, wherever it lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Build = Callable[[Iterable[nn.Parameter]], Optimizer]
"""Makes an optimizer of torch's own over some parameters. It may look at their number of dimensions, and updates
element by element."""


@dataclass
class OffloadedParts:
    """What of a parameter has left the device: its gradient until the step is over, or itself, which lies on a disk
    for good."""

    gradient: Callable[[], Tensor] | None = None  # brings the gradient back
    squared_norm: Tensor | None = None  # the squared norm of the gradient, on the device
    read: Callable[[], Tensor] | None = None
    write: Callable[[Tensor], None] | None = None


class HeldParameter(Protocol):
    """What this rank holds of one parameter: `Shard` of parallel/shards.py."""

    @property
    def name(self) -> str: ...
    @property
    def parameter(self) -> nn.Parameter: ...
    @property
    def local(self) -> nn.Parameter: ...
    @property
    def gradient(self) -> Tensor | None: ...
    @property
    def gradient_here(self) -> Tensor | None: ...
    @property
    def elsewhere(self) -> OffloadedParts: ...


@dataclass
class Piece:
    """Elements `start` to `stop` of one shard, and the parameter that the inner optimizer has for them."""

    shard: HeldParameter
    start: int
    stop: int
    master: nn.Parameter


@dataclass
class UpdateGroup:
    """Pieces that are updated at once, by an optimizer of their own."""

    pieces: list[Piece]
    optimizer: Optimizer
    number: int = 0
    hyper: list[dict[str, Any]] = field(default_factory=list)  # our group whose learning rate each inner group follows


class OffloadedOptimizer(Optimizer):
    """Updates parameters that are in CPU memory already: their own tensors are updated. The subclasses move things."""

    grad_factor: Tensor | None = None  # what the next step multiplies gradients by
    takes_gradients_early = False

    def __init__(self, shards: Iterable[HeldParameter], build: Build):
        self.shards = [shard for shard in shards if shard.local.requires_grad]
        super().__init__(_without_state(build(shard.local for shard in self.shards)), {})
        ours = {id(local): group for group in self.param_groups for local in group["params"]}
        self.groups = list(self._make_groups(build))
        for number, group in enumerate(self.groups):
            group.number = number
            owner = {id(piece.master): ours[id(piece.shard.local)] for piece in group.pieces}
            group.hyper = [owner[id(inner["params"][0])] for inner in group.optimizer.param_groups]
        self.pieces: dict[nn.Parameter, list[tuple[UpdateGroup, Piece]]] = {}
        for group in self.groups:
            for piece in group.pieces:
                self.pieces.setdefault(piece.shard.local, []).append((group, piece))
        self.state = _StateByParameter(self)  # type: ignore[assignment]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Makes one update, group by group. Gradients are multiplied by `grad_factor` on their way."""
        factor = None if self.grad_factor is None else self.grad_factor.detach().cpu()
        self._begin()
        for number, group in enumerate(self.groups):
            self._fetch(number)
            for inner, ours in zip(group.optimizer.param_groups, group.hyper, strict=True):
                inner["lr"] = ours["lr"]
            update(group.optimizer, factor)
            self._give_back(number)
        self._end()
        self.grad_factor = None

    def stream_gradients(self, shards: Sequence[HeldParameter], is_last: Callable[[], bool]) -> None:
        """Lets these gradients leave as soon as backward has them: those to which nothing is added later. `is_last`
        says whether the backward that runs is the step's last for them."""
        ours = {id(shard.local) for shard in self.shards if self.takes_gradients_early}
        for shard in shards:
            if id(shard.local) in ours:
                shard.parameter.register_post_accumulate_grad_hook(
                    lambda _, shard=shard: self._send(shard) if is_last() else None
                )

    def about(self) -> str:
        """Returns a line for people that says where state and parameters are."""
        return "offload  nothing moves: parameters and optimizer state are in CPU memory, where the update runs"

    # What the subclasses say ----------------------------------------------------------------------------------------

    def _make_groups(self, build: Build) -> Iterator[UpdateGroup]:
        locals_ = [shard.local for shard in self.shards]
        pieces = [Piece(shard, 0, shard.local.numel(), shard.local) for shard in self.shards]
        if pieces:
            yield UpdateGroup(pieces, build(locals_))

    def _send(self, shard: HeldParameter) -> None:
        """Moves the gradient from the device, which forgets it."""

    def _begin(self) -> None:
        for shard in self.shards if self.takes_gradients_early else ():
            self._send(shard)  # those that were not complete before backward ended

    def _fetch(self, number: int) -> None:
        """Brings the masters, their gradients and the state of this group into CPU memory."""

    def _give_back(self, number: int) -> None:
        """Is called when a group was updated."""

    def _end(self) -> None:
        """Is called when all groups were updated."""

    # State by parameter ---------------------------------------------------------------------------------------------

    def state_of(self, local: nn.Parameter) -> dict[str, Tensor]:
        """Returns the state of one parameter by name; empty before the first step."""
        ((group, piece),) = self.pieces[local]
        return dict(group.optimizer.state[piece.master]) if piece.master in group.optimizer.state else {}

    def state_shapes(self, local: nn.Parameter) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Returns shape and number format of each state of one parameter, by name, without bringing it."""
        return {name: (value.shape, value.dtype) for name, value in self.state_of(local).items()}

    def one_state(self, local: nn.Parameter, name: str) -> Tensor:
        """Returns one state of one parameter."""
        return self.state_of(local)[name]

    def put_state(self, local: nn.Parameter, key: str, value: Tensor) -> None:
        """Takes over one tensor of a checkpoint, already cut to this rank's share."""
        ((group, piece),) = self.pieces[local]
        group.optimizer.state[piece.master][key] = in_memory(value, piece.master)

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes over states by the number of the parameter, as torch's does."""
        ordered = [local for group in self.param_groups for local in group["params"]]
        for number, state in state_dict["state"].items():
            for key, value in state.items():
                self.put_state(ordered[number], key, value)


class _StateByParameter(Mapping[nn.Parameter, dict[str, Tensor]]):
    """Is what `optimizer.state` is for those who read it: states are brought when they are asked for."""

    def __init__(self, optimizer: OffloadedOptimizer):
        self.optimizer = optimizer

    def __getitem__(self, local: nn.Parameter) -> dict[str, Tensor]:
        if local not in self.optimizer.pieces:
            raise KeyError(local)
        return self.optimizer.state_of(local)

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self.optimizer.pieces)

    def __len__(self) -> int:
        return len(self.optimizer.pieces)


@torch.no_grad()
def update(optimizer: Optimizer, factor: Tensor | None) -> None:
    """Makes one step of torch's optimizer over gradients times `factor`. Fused kernels divide by a scalar on their way;
    it has 32 bits, so fp64 gradients are multiplied first."""
    inner: Any = optimizer
    gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if factor is None or not gradients:
        optimizer.step()
        return
    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if is_fused and not any(gradient.dtype == torch.float64 for gradient in gradients):
        inner.grad_scale, inner.found_inf = (1.0 / factor).float(), torch.zeros(())
        optimizer.step()
        inner.grad_scale = inner.found_inf = None
        return
    for dtype in {gradient.dtype for gradient in gradients}:
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))
    optimizer.step()


def in_memory(value: Tensor, like: Tensor) -> Tensor:
    """Returns a copy of a state as torch keeps it: counters on the CPU, the rest with the parameter's device, format
    and shape."""
    if not value.ndim:
        return value.detach().clone().cpu()
    return value.detach().to(like.device, like.dtype, copy=True).view_as(like)


def _without_state(optimizer: Optimizer) -> list[dict[str, Any]]:
    optimizer.state.clear()
    return optimizer.param_groups
