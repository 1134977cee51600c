"""Counts what a rank holds at every moment of a step, by category, tensor by tensor.

A dispatch mode sees the result of every operation and notes its storage; a weak reference says when that storage is
gone. Views share a storage and count once. Who owns a storage is said by `owners`: parameters, gradients, optimizer
state, gathered buffers. The rest was made by a forward pass (activations) or by anything else (temporary). Invariant:
it only looks. No operation gets other inputs, and no tensor lives longer. It costs Python time per operation, so it
stays on for the first steps of a run only.

FSDP2 frees and refills its buffers by `UntypedStorage.resize_`, which is no operation: while the account is open that
method is wrapped, as in torch's own memory tracker. A backward pass on CUDA runs in threads of its own, to which
autograd hands the mode on.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from shardwise.memory.points import CATEGORIES, OverLimit, Point

RELABEL_SHARE = 0.02  # of the bytes held: as much may be new before owners are asked again
MAX_RAW_POINTS = 20_000


class OwnedTensor(NamedTuple):
    """A tensor whose owner is known."""

    category: str
    name: str
    tensor: Tensor


Owners = Callable[[bool], Iterable[OwnedTensor]]
"""Yields what is owned. Called with True it yields everything, with False only what changes within a step: gradients
and gathered parameters."""


@dataclass(slots=True)
class _Storage:
    """A live storage: its bytes, its category and since when it is there."""

    size: int
    category: str
    born: float
    shape: tuple[int, ...]  # the shape of the tensor it was first seen with
    ends: weakref.ref[Any]
    name: str = ""


class _Relabelled(NamedTuple):
    """A storage whose owner was found after it was made."""

    born: float
    size: int
    before: str
    after: str


@dataclass(eq=False)
class Account(TorchDispatchMode):
    """Counts while it is open: `with account: …` around a step. It may be opened again for the next one; what it knows
    stays."""

    device: torch.device
    owners: Owners
    clock: Any
    limit: int | None = None  # bytes that live tensors may reach
    points: list[Point] = field(default_factory=list)  # the moments, filled while `records` is set
    records: bool = False

    def __post_init__(self) -> None:
        super().__init__()
        self.storages: dict[int, _Storage] = {}
        self.held = dict.fromkeys(CATEGORIES, 0)
        self.first = self.peak = Point(0.0, (0,) * len(CATEGORIES), None)
        self._total = 0
        self._unsure = 0  # bytes that may have found an owner since owners were asked
        self._span: Any = None
        self._gone: deque[int] = deque()  # filled by finalizers, which may run anywhere

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: torch asks whether to load its compiler, only to leave this class alone. That takes seconds
        and 70 MiB."""
        return False

    # Opening and closing -------------------------------------------------------------------------------------------

    def __enter__(self) -> Account:
        self.label(everything=True)
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing()  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *trouble: Any) -> None:
        super().__exit__(*trouble)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        if trouble[0] is None:
            self.label(everything=True)
            self._look()

    @contextmanager
    def of_saved(self) -> Iterator[None]:
        """Counts around a step instead of `with account`, where blocks are compiled: of what operations make, only what
        autograd saves for backward is counted."""
        self.label(everything=True)

        def keep(tensor: Tensor) -> Tensor:
            self._settle()
            if sum(self._note(part, "activations") for part in plain_parts(tensor)):
                self._look()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            yield

    def _resizing(self) -> Callable[..., Any]:
        resize = self._resize

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            known = self.storages.get(storage._cdata)
            if known is not None:
                self._resized(known, size)
                self._look()
            return result

        return resize_

    # Seeing --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._settle()
        span = self.clock.open[-1] if self.clock.open else None
        if span is not self._span:
            self._span = span
            if span is not None and span.kind == "optimizer":  # all gradients are there, and not yet gone
                self.label()
        new = 0
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                new += sum(self._note(part) for part in plain_parts(tensor))
        if new:
            if not torch.is_grad_enabled():  # with gradients it can only be an activation
                self._unsure += new
            if self._unsure > RELABEL_SHARE * self._total:
                self.label()
            self._look()
        return result

    def _made_by(self) -> str:
        """Returns the category of a new storage. A forward pass leaves activations, also one that a backward pass
        repeats: then gradients are recorded inside of it."""
        if torch._C._current_graph_task_id() != -1:
            return "activations" if torch.is_grad_enabled() else "temporary"
        return "activations" if any(span.name == "forward" for span in self.clock.open) else "temporary"

    def _note(self, tensor: Tensor, category: str = "", name: str = "") -> int:
        """Counts a tensor's storage if it is new; returns its bytes then, else 0."""
        if tensor.device.type != self.device.type:
            return 0
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.storages:
            return 0
        gone = self._gone
        ends = weakref.ref(storage, lambda _: gone.append(key))
        size, category = storage.nbytes(), category or self._made_by()
        self.storages[key] = _Storage(size, category, time.perf_counter(), tuple(tensor.shape), ends, name)
        self._add(category, size)
        return size

    def _settle(self) -> None:
        while self._gone:
            known = self.storages.pop(self._gone.popleft())
            self._add(known.category, -known.size)

    def label(self, everything: bool = False) -> None:
        """Asks the owners whose storages are whose; what was not known before is counted from now on."""
        self._settle()
        seen, moved = set[int](), list[_Relabelled]()
        for category, name, tensor in self.owners(everything):
            for part in plain_parts(tensor):
                self._note(part, category, name)
                known = self.storages.get(part.untyped_storage()._cdata)
                if known is None or id(known) in seen:
                    continue
                seen.add(id(known))
                self._resized(known, part.untyped_storage().nbytes())  # it may have been while the account was closed
                if known.category not in (category, "parameters"):
                    self._add(known.category, -known.size)
                    self._add(category, known.size)
                    moved.append(_Relabelled(known.born, known.size, known.category, category))
                    known.category = category
                known.name = name
        self._correct(moved)
        self._unsure = 0

    def _correct(self, moved: list[_Relabelled]) -> None:
        """Corrects the moments since a storage was made whose owner is found late: it was the owner since then."""
        if not moved:
            return
        self.peak = _corrected(self.peak, [change for change in moved if change.born <= self.peak.at])
        moved.sort(reverse=True)
        waiting, index = moved[-1].born, len(self.points)
        while index and self.points[index - 1].at >= waiting:
            index -= 1
            self.points[index] = _corrected(self.points[index], [c for c in moved if c.born <= self.points[index].at])

    def _resized(self, known: _Storage, size: int) -> None:
        self._add(known.category, size - known.size)
        known.size = size

    def _add(self, category: str, size: int) -> None:
        self.held[category] += size
        self._total += size

    # Reading -------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Forgets earlier peaks and points: a new step is looked at."""
        self._settle()
        self.points.clear()
        self.first = self.peak = self.now()

    def settled(self) -> Point:
        """Returns the bytes that are held at this moment, without those of storages that are gone by now."""
        self._settle()
        return self.now()

    def fullest(self) -> dict[str, int]:
        """Returns the most bytes of each category that were held at any recorded moment."""
        moments = [self.peak, *self.points]
        return {name: max(p.held[index] for p in moments) for index, name in enumerate(CATEGORIES)}

    def largest(self, number: int = 3) -> list[tuple[str, int]]:
        """Returns the storages that take most bytes, with their owners' names, or category and shape."""
        first = sorted(self.storages.values(), key=lambda known: -known.size)[:number]
        return [(known.name or f"{known.category} {list(known.shape)}", known.size) for known in first]

    def _look(self) -> None:
        is_peak = self._total > self.peak.total
        if not is_peak and not self.records:
            return
        point = self.now()
        if is_peak:
            self.peak = point
            if self.limit is not None and self._total > self.limit:
                self.label(everything=True)
                raise OverLimit(self._total, self.limit, self.now(), self.largest())
        if self.records:
            self.points.append(point)
            if len(self.points) > MAX_RAW_POINTS:
                self.points[:] = [
                    max(pair, key=lambda p: p.total) for pair in zip(*[iter(self.points)] * 2, strict=False)
                ]

    def now(self) -> Point:
        """Returns the bytes that are held at this moment, by category."""
        during = self.clock.open[-1] if self.clock.open else None
        return Point(time.perf_counter(), tuple(self.held.values()), during)


def _corrected(point: Point, moved: list[_Relabelled]) -> Point:
    held = point.by_category()
    for _, size, before, after in moved:
        held[before] -= size
        held[after] += size
    return point._replace(held=tuple(held.values()))


def plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the tensors that have memory: a DTensor or a quantized tensor is made of others."""
    if type(tensor) is Tensor:
        yield tensor
    elif is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            yield from plain_parts(getattr(tensor, name))
    else:
        yield tensor
