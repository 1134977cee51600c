"""Selective recompute (selective activation checkpointing): outputs of projections and of fused attention are kept,
what is cheap between them is computed again.

Owns the choice and its bookkeeping, one block at a time. While a block runs, a torch-function mode writes down each
cheap call (norms, activations, elementwise multiplications, rotations, casts, plain attention scores). When the block
has ended, every tensor that autograd wanted to save is one of three: made by no cheap call, then it is kept; made by
one whose inputs are kept anyway, then it is dropped and computed again in backward; or made by one whose inputs would
have to be kept instead, then nothing is won and it is kept. Invariants: calls are repeated as they were made, so
gradients have the same bits; kept tensors are saved as any operation saves them.

torch's own way (`create_selective_checkpoint_contexts`) looks at every operation of the block twice, in Python, which
cost 21 % of a step of `tiny` on a CPU: docs/log.md has the figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from shardwise.memory.environment import Environment, keep, kept

CHEAP = {
    "rms_norm", "layer_norm", "silu", "gelu", "relu", "tanh", "sigmoid", "softplus", "softmax",
    "add", "sub", "__rsub__", "mul", "div", "neg", "pow", "square", "sqrt", "rsqrt", "exp", "mean",
    "to", "float", "type_as", "cat", "stack", "pad", "repeat_interleave", "contiguous", "flatten", "reshape",
    "where", "masked_fill", "matmul", "bmm",
}  # fmt: skip
"""The names of torch functions that are cheap to repeat. `matmul` is of two activations, as in plain attention;
projections are `linear`, which is not here."""

SMALL = 8
"""What a call saves on the side (one element per row of a norm) is kept when it is this many times smaller than its
result."""


def select(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a block's forward that saves by these rules."""

    @wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        recorder = _CallRecorder()
        with recorder, saved_tensors_hooks(recorder.save, _Slot.tensor):
            output = forward(*args, **kwargs)
        recorder.settle()
        return output

    return run


class _KeptTensors:
    """The tensors of a block that stay. They go together, when backward has left the block."""

    handle: Tensor | None = None
    tensors: tuple[Tensor, ...] = ()

    def save(self, tensors: list[Tensor]) -> None:
        self.handle = keep(tensors)

    def __getitem__(self, index: int) -> Tensor:
        if self.handle is not None:
            self.tensors, self.handle = kept(self.handle), None
        return self.tensors[index]


@dataclass(frozen=True, slots=True)
class _View:
    """An argument or a saved tensor: a part of what a call makes, or one that stays."""

    source: _CheapCall | _KeptTensors
    index: int  # its number among the tensors that stay
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool

    def value(self, memo: dict[int, Tensor]) -> Tensor:
        if isinstance(self.source, _KeptTensors):
            return self.source[self.index].detach().requires_grad_(self.requires_grad)
        whole = self.source.output(memo)
        return whole.as_strided(self.shape, self.stride, self.offset).requires_grad_(self.requires_grad)


class _CheapCall:
    """A cheap call: how to repeat it, and who waits for what it makes."""

    def __init__(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], environment: Environment):
        self.func, self.arguments, self.environment = func, (args, kwargs), environment
        self.inputs = list(_tensors((*args, *kwargs.values())))  # kept until the block has ended
        self.result: Tensor | None = None  # kept as long
        self.num_saved = 0
        # A list of those who wait would be a circle, and the block would stay until the garbage collector comes.
        self.num_waiting = 0
        self.num_given = 0
        self.again: tuple[Tensor, list[Tensor]] | None = None  # what it made in backward, while somebody waits for it

    def output(self, memo: dict[int, Tensor]) -> Tensor:
        """Returns its result, computed at most once per request (`memo`); where saved tensors wait for it, once for
        all."""
        if self.num_waiting:
            return self.repeated(memo)[0]
        if id(self) not in memo:
            memo[id(self)] = self._repeat(memo)[0]
        return memo[id(self)]

    def repeated(self, memo: dict[int, Tensor]) -> tuple[Tensor, list[Tensor]]:
        if self.again is None:
            self.again = self._repeat(memo)
        return self.again

    def given(self) -> None:
        """Notes that one of those who wait has got its tensor. After the last one the results may go."""
        self.num_given += 1
        if self.num_given % self.num_waiting == 0:
            self.again = None

    def _repeat(self, memo: dict[int, Tensor]) -> tuple[Tensor, list[Tensor]]:
        saved: list[Tensor] = []
        args, kwargs = tree_map(lambda leaf: leaf.value(memo) if isinstance(leaf, _View) else leaf, self.arguments)
        note: Callable[[Tensor], None] = lambda tensor: saved.append(tensor.detach())  # noqa: E731
        with torch.enable_grad(), self.environment.restored(), saved_tensors_hooks(note, _never):
            output = self.func(*args, **kwargs)
        found = list(saved)
        saved.clear()  # the graph of `output` holds the hook, and what it noted holds the graph: neither would ever go
        return output.detach(), found


class _Slot:
    """Stands in the graph for one saved tensor."""

    __slots__ = ("call", "number", "original", "view")

    def __init__(self, original: Tensor, call: _CheapCall | None):
        self.original: Tensor | None = original  # until the block has ended
        self.view: _View | None = None
        self.call, self.number = call, -1  # the cheap call that saved it, as its n-th
        if call is not None:
            self.number = call.num_saved
            call.num_saved += 1

    def tensor(self) -> Tensor:
        if self.view is None:
            assert self.call is not None, "the block has not ended"
            call, value = self.call, self.call.repeated({})[1][self.number]
        elif isinstance(self.view.source, _KeptTensors):
            return self.view.source[self.view.index]
        else:
            call, value = self.view.source, self.view.value({}).detach()
        call.given()
        return value


class _CallRecorder(TorchFunctionMode):
    """Notes what happens in one block, in one pass."""

    def __init__(self) -> None:
        super().__init__()
        self.environment = Environment(None, random=False)
        self.calls: list[_CheapCall] = []
        self.slots: list[_Slot] = []
        self.running: _CheapCall | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in CHEAP:
            return func(*args, **kwargs)
        self.running = call = _CheapCall(func, args, kwargs, self.environment)
        try:
            result = func(*args, **kwargs)
        finally:
            self.running = None
        # A cast that changes nothing returns its input.
        if isinstance(result, Tensor) and all(_memory(result) != _memory(x) for x in call.inputs):
            call.result = result
            self.calls.append(call)
        return result

    def save(self, tensor: Tensor) -> _Slot:
        slot = _Slot(tensor, self.running)
        self.slots.append(slot)
        return slot

    def settle(self) -> None:
        """Drops what can be computed from what stays; called when the block has ended."""
        makers = {_memory(call.result): call for call in self.calls}
        wanted: dict[_CheapCall, dict[_Slot, Tensor]] = {call: {} for call in self.calls}
        stays: dict[int, int] = {}  # memory -> bytes
        for slot in self.slots:
            assert slot.original is not None
            place = _memory(slot.original)
            if place in makers:
                wanted[makers[place]][slot] = slot.original
            elif slot.call in wanted and _is_inner(slot.original, slot.call):
                wanted[slot.call][slot] = slot.original
                continue
            else:
                stays[place] = _num_bytes(slot.original)
            slot.call = None
        needs: dict[_CheapCall, dict[int, int]] = {}
        for call in self.calls:
            needs[call] = {}
            for x in call.inputs:
                needs[call] |= needs[makers[_memory(x)]] if _memory(x) in makers else {_memory(x): _num_bytes(x)}
            won = {_memory(x): _num_bytes(x) for x in wanted[call].values()}
            if not won:
                continue
            if sum(won.values()) > sum(size for place, size in needs[call].items() if place not in stays):
                stays |= needs[call]
                call.num_waiting = len(wanted[call])
            else:
                stays |= won
                del makers[_memory(call.result)]
                for slot in wanted[call]:
                    slot.call = None
        self._let_go(makers)

    def _let_go(self, makers: dict[int, _CheapCall]) -> None:
        """Drops everything of the block but what was decided to stay."""
        store = _KeptTensors()
        indices: dict[Any, int] = {}
        staying: list[Tensor] = []

        def view(x: Tensor) -> _View:
            call, index, offset = makers.get(_memory(x)), -1, int(x.storage_offset())
            if call is None:
                index = indices.setdefault((_memory(x), x.dtype, x.shape, x.stride(), offset), len(staying))
                if index == len(staying):
                    staying.append(x.detach())
            return _View(call or store, index, x.shape, x.stride(), offset, x.requires_grad)

        repeated: set[_CheapCall] = set()
        for call in reversed(self.calls):  # later calls need earlier ones
            if call.num_waiting or call in repeated:
                repeated |= {makers[_memory(x)] for x in call.inputs if _memory(x) in makers}
                call.arguments = tree_map(lambda x: view(x) if isinstance(x, Tensor) else x, call.arguments)
            else:
                call.arguments = ((), {})
        for slot in self.slots:
            if slot.call is None:
                assert slot.original is not None
                slot.view = view(slot.original)
            slot.original = None
        store.save(staying)
        for call in self.calls:
            call.inputs, call.result = [], None
        self.calls, self.slots = [], []


def _is_inner(x: Tensor, call: _CheapCall) -> bool:
    """Returns whether a cheap call made this tensor for itself, and it is large enough to be worth computing again."""
    is_large = SMALL * _num_bytes(x) > _num_bytes(call.result)
    return is_large and all(_memory(x) != _memory(given) for given in call.inputs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _memory(x: Tensor | None) -> int:
    """Returns a number for a tensor's storage: equal for tensors that share memory, as long as they live."""
    assert x is not None
    return x.untyped_storage()._cdata


def _num_bytes(x: Tensor | None) -> int:
    assert x is not None
    return x.untyped_storage().nbytes()


def _never(_: None) -> Tensor:
    raise AssertionError("nobody goes backward through a repeated call")
