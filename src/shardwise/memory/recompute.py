"""Recompute (activation checkpointing): what forward leaves out, backward computes again. Fewer bytes, more work, the
same bits.

Owns the wrapping of blocks and the segment, the unit that is computed again at once. `full` makes each block a
segment, `every-K` every K-th one, `sqrt` puts about sqrt(L) neighbours into each; `selective` is in selective.py.
Invariant: inside a segment nothing is saved but its inputs, and those are saved the way an operation saves tensors,
so whoever hooks saved tensors (counting, offload) sees them. Random draws, autocast and torch-function modes are in
backward what they were in forward.

torch's own checkpoint wants one function per segment. Here a segment grows call by call, because the loop over the
blocks may be somebody else's; otherwise the idea is that of `use_reentrant=False`. Blocks are wrapped inside of what
FSDP2 puts around them: it gathers the last block of a segment before backward reaches it, and the others as it does
in any forward pass.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwise.memory.environment import Environment, keep, kept
from shardwise.memory.selective import select
from shardwise.spec.recompute import recompute_of, segments


def apply_recompute(blocks: Sequence[nn.Module], mode: str, first: int = 0) -> None:
    """Wraps consecutive blocks in place, the first of which is number `first` of the model; before FSDP2 sees them."""
    if recompute_of(mode).is_selective:
        for block in blocks:
            block.forward = select(block.forward)
        return
    for part in segments(mode, range(first, first + len(blocks))):
        Recomputed([blocks[index - first] for index in part])


class Recomputed:
    """Neighbouring blocks that are computed again together."""

    def __init__(self, blocks: Sequence[nn.Module]):
        self.blocks, self.forwards = blocks, [block.forward for block in blocks]
        self.open: _Segment | None = None  # of the pass that is inside these blocks now
        self.is_repeating = False
        for position, block in enumerate(blocks):
            block.forward = self._wrapped(position)

    def _wrapped(self, position: int) -> Callable[..., Any]:
        forward = self.forwards[position]

        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.is_repeating or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            segment = self.open
            if segment is None or position == 0 or segment.calls[-1].position != position - 1:
                segment = _Segment(self)
            self.open = segment if position < len(self.blocks) - 1 else None
            return segment.run(position, args, kwargs)

        return run


_thread = threading.local()


def is_repeating() -> bool:
    """Returns whether this thread computes blocks again, in backward. Then nobody else may take what they save."""
    return getattr(_thread, "repeats", False)


class _Previous(NamedTuple):
    """An argument that is a result of the call before, so that it is not kept."""

    number: int


class _Kept(NamedTuple):
    """An argument that was saved."""

    number: int
    requires_grad: bool


class _BlockCall:
    """One block of a segment: how to run it once more."""

    def __init__(self, position: int, arguments: Any, results: list[_Result]):
        self.position = position
        leaves, self.shape = tree_flatten(arguments)
        tensors: list[Tensor] = []
        self.leaves: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                found = next((index for index, result in enumerate(results) if result.is_in(leaf)), None)
                if found is not None:
                    leaf = _Previous(found)
                else:
                    tensors.append(leaf.detach())
                    leaf = _Kept(len(tensors) - 1, leaf.requires_grad)
            self.leaves.append(leaf)
        self.tensors = keep(tensors)
        self.environment = Environment(next((leaf.device for leaf in leaves if isinstance(leaf, Tensor)), None))

    def arguments(self, results: list[Tensor]) -> Any:
        tensors = kept(self.tensors)
        leaves = []
        for leaf in self.leaves:
            if isinstance(leaf, _Previous):
                leaf = results[leaf.number]
            elif isinstance(leaf, _Kept):
                leaf = tensors[leaf.number].detach().requires_grad_(leaf.requires_grad)
            leaves.append(leaf)
        return tree_unflatten(leaves, self.shape)


class _Result:
    """A tensor that a call returned, to be recognised when it comes back as an argument of the next one. It may come
    as an alias (FSDP2 makes one); while the original lives, equal places in memory mean that it is the same."""

    def __init__(self, tensor: Tensor):
        self.alive, self.version, self.place = weakref.ref(tensor), tensor._version, _place(tensor)

    def is_in(self, tensor: Tensor) -> bool:
        original = self.alive()
        return original is not None and original._version == self.version and _place(tensor) == self.place


def _place(x: Tensor) -> tuple[Any, ...]:
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype


class _DroppedTensor:
    """Stands in the graph for a saved tensor that was not kept."""

    __slots__ = ("__weakref__", "value")

    def __init__(self) -> None:
        self.value: Tensor | None = None


class _Done(Exception):
    """Is raised when everything that was saved is there again: what would follow, such as a last matmul, is not
    needed."""


class _Segment:
    """One pass of one micro-batch through neighbouring blocks."""

    def __init__(self, owner: Recomputed):
        self.owner = owner
        self.calls: list[_BlockCall] = []
        self.held: list[weakref.ref[_DroppedTensor]] = []
        self.results: list[_Result] = []

    def run(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.calls.append(_BlockCall(position, (args, kwargs), self.results))
        with saved_tensors_hooks(self._leave_out, self._give_back):
            output = self.owner.forwards[position](*args, **kwargs)
        self.results = [_Result(leaf) for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        return output

    def _leave_out(self, tensor: Tensor) -> _DroppedTensor:
        held = _DroppedTensor()
        self.held.append(weakref.ref(held))
        return held

    def _give_back(self, held: _DroppedTensor) -> Tensor:
        if held.value is None:
            self._repeat()
        value, held.value = held.value, None
        assert value is not None, "the block saved fewer tensors when it was computed again"
        return value

    def _repeat(self) -> None:
        """Runs the calls once more, until every tensor that was saved has been saved again."""
        number = 0

        def take(tensor: Tensor) -> None:
            nonlocal number
            held = self.held[number]() if number < len(self.held) else None
            if held is not None:
                held.value = tensor.detach()
            number += 1
            if number == len(self.held):
                raise _Done

        results: list[Tensor] = []
        self.owner.is_repeating = _thread.repeats = True
        try:
            with torch.enable_grad(), saved_tensors_hooks(take, _never):
                for call in self.calls:
                    # Backward has gathered the parameters of the last block. The others are called from outside,
                    # where FSDP2 does it.
                    is_last = call is self.calls[-1]
                    block = self.owner.forwards[call.position] if is_last else self.owner.blocks[call.position]
                    args, kwargs = call.arguments(results)
                    with call.environment.restored():
                        output = block(*args, **kwargs)
                    results = [leaf for leaf in tree_flatten(output)[0] if isinstance(leaf, Tensor)]
        except _Done:
            pass
        finally:
            self.owner.is_repeating = _thread.repeats = False


def _never(_: None) -> Tensor:
    raise AssertionError("nobody goes backward through a repeated forward pass")
