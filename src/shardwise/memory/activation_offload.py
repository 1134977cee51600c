"""Activation offload: what a block saves for backward waits in pinned CPU memory, and comes back one block ahead.

Owns the hooks on saved tensors, two side streams and the pages: one page is what one block saved in one pass.
Invariants: at most `LEAVING` pages are on their way out while forward computes on, and in backward at most one page
is fetched ahead; parameters and small tensors stay. Blocks are wrapped outside of recompute, so with `recompute=full`
only their inputs travel. torch's own `save_on_cpu` copies in the stream that computes: nothing overlaps.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from shardwise.memory.recompute import is_repeating
from shardwise.spec.recompute import check_activation_offload

SMALL_BYTES = 4096
"""A tensor of fewer bytes is not worth a copy."""

LEAVING = 2


def apply_activation_offload(blocks: Sequence[nn.Module], device: torch.device) -> None:
    """Wraps blocks in place, after recompute and before FSDP2 sees them."""
    check_activation_offload(device.type)
    store = _Offloader(device)
    for block in blocks:
        block.forward = store.wrapped(block, block.forward)


class _Offloader:
    """The pages of all blocks of a model, and the two streams on which they travel."""

    def __init__(self, device: torch.device):
        # As tensors say it: `cuda` without a number is none of theirs.
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self.out, self.back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self.leaving: deque[_Page] = deque()
        self.newest: weakref.ref[_Page] | None = None

    def wrapped(self, block: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled() or is_repeating():
                return forward(*args, **kwargs)
            # Inside of FSDP2's hooks these are the gathered parameters.
            page = _Page(self, {parameter.untyped_storage().data_ptr() for parameter in block.parameters()})
            with saved_tensors_hooks(page.put, _OffloadedTensor.tensor):
                output = forward(*args, **kwargs)
            self._send(page)
            return output

        return run

    def _send(self, page: _Page) -> None:
        """Starts the copies of a page to CPU memory. What left two pages ago must be gone: then its memory may be used
        for what comes next."""
        page.before, self.newest = self.newest, weakref.ref(page)
        self.out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out):
            for moved in page.moved.values():
                assert moved.here is not None
                moved.away = torch.empty(moved.here.shape, dtype=torch.uint8, pin_memory=True)
                moved.away.copy_(moved.here, non_blocking=True)
            page.has_left = self.out.record_event()
        self.leaving.append(page)
        while len(self.leaving) > LEAVING:
            self.leaving.popleft().let_go()


class _OffloadedStorage:
    """A storage that is on the device, in CPU memory, or in both. Views of it are made anew when it is back."""

    def __init__(self, here: Tensor):
        self.here: Tensor | None = here  # as bytes
        self.away: Tensor | None = None


class _Page:
    """Holds what one block saved in one pass."""

    def __init__(self, store: _Offloader, parameters: set[int]):
        self.store, self.parameters = store, parameters
        self.moved: dict[int, _OffloadedStorage] = {}
        self.before: weakref.ref[_Page] | None = None  # the page of the block before, which backward needs next
        self.has_left: torch.cuda.Event | None = None
        self.is_back: torch.cuda.Event | None = None
        self.is_awaited = False

    def put(self, tensor: Tensor) -> _OffloadedTensor | Tensor:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        plain = type(tensor) is Tensor and tensor.device == self.store.device and storage.nbytes() >= SMALL_BYTES
        if not plain or place in self.parameters:
            return tensor
        if place not in self.moved:  # the tensor is held here, so nobody else gets its place
            self.moved[place] = _OffloadedStorage(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
        return _OffloadedTensor(self, self.moved[place], tensor)

    def let_go(self) -> None:
        """Lets the memory on the device be used again, by what the stream computes after the copy."""
        if self.is_back is not None:
            return  # backward came first
        assert self.has_left is not None
        torch.cuda.current_stream(self.store.device).wait_event(self.has_left)
        for moved in self.moved.values():
            moved.here = None

    def fetch(self) -> None:
        """Starts the copies back, unless the memory is still here."""
        if self.is_back is not None:
            return
        store, current = self.store, torch.cuda.current_stream(self.store.device)
        if self in store.leaving:
            store.leaving.remove(self)
            assert self.has_left is not None
            current.wait_event(self.has_left)
            self.is_back = current.record_event()
            return
        # Memory for it comes from the stream that computes: what was freed there may still be read by earlier work.
        for moved in self.moved.values():
            assert moved.away is not None
            moved.here = torch.empty(moved.away.shape, dtype=torch.uint8, device=store.device)
            moved.here.record_stream(store.back)  # should nobody come for it
        store.back.wait_stream(current)
        with torch.cuda.stream(store.back):
            for moved in self.moved.values():
                assert moved.here is not None and moved.away is not None
                moved.here.copy_(moved.away, non_blocking=True)
            self.is_back = store.back.record_event()

    def arrive(self) -> None:
        """Is called when backward has reached this block: waits for its page, and starts to fetch that of the block
        before."""
        if self.is_awaited:
            return
        self.fetch()
        self.is_awaited = True
        assert self.is_back is not None
        torch.cuda.current_stream(self.store.device).wait_event(self.is_back)
        before = self.before() if self.before is not None else None
        if before is not None:
            before.fetch()


class _OffloadedTensor:
    """Stands in the graph for a saved tensor."""

    __slots__ = ("dtype", "moved", "offset", "page", "shape", "stride")

    def __init__(self, page: _Page, moved: _OffloadedStorage, tensor: Tensor):
        self.page, self.moved, self.dtype = page, moved, tensor.dtype
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), int(tensor.storage_offset())

    def tensor(self: _OffloadedTensor | Tensor) -> Tensor:
        if isinstance(self, Tensor):
            return self
        self.page.arrive()
        assert self.moved.here is not None
        empty = torch.empty(0, dtype=self.dtype, device=self.moved.here.device)
        return empty.set_(self.moved.here.untyped_storage(), self.offset, self.shape, self.stride)
