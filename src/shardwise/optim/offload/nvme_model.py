"""Keeps parameters, gradients and optimizer state on a disk: memory holds the blocks that are computed with, and a
buffer.

A block's parameters are read when FSDP2 gathers it and forgotten after; the block that came next the last time is
read ahead. A gradient is written as soon as the last backward has it. Then the optimizer goes through the file as in
nvme.py, with two more rows per group. Invariant: between uses the tensors of parameters have shapes and no memory;
`Shard.value` and `Shard.put` know where the elements are. While micro-batches accumulate, their gradients stay in
memory. For CPUs only so far.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwise.optim.offload.buffer import Buffer, Disk
from shardwise.optim.offload.disk import NOTHING, Transfer, aligned, new_buffer
from shardwise.optim.offload.nvme import NvmeOptimizer, flat_shape
from shardwise.optim.offload.optimizer import Build, HeldParameter, Piece

NUM_LANDINGS = 2  # buffers for gradients on their way to the disk


class GatheredParameter(Protocol):
    """A parameter of a group: `ShardedParameter` of parallel/fsdp2.py."""

    rows: Tensor  # this rank's elements, flat: what an all-gather reads


class GatheredGroup(Protocol):
    """Parameters that FSDP2 gathers together: `ParameterGroup` of parallel/fsdp2.py."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def in_backward(self) -> bool: ...
    @property
    def gather_buffer(self) -> Tensor | None: ...
    @property
    def will_gather(self) -> bool: ...
    def replace_unshard(self, wrap: Callable[[Callable[[bool], None]], Callable[..., None]]) -> None: ...
    def replace_wait(self, wrap: Callable[[Callable[[], None]], Callable[[], None]]) -> None: ...


Served = list[tuple[GatheredParameter, HeldParameter]]
"""The trained parameters of a group, as FSDP2 and as the optimizer hold them."""


class NvmeModel(NvmeOptimizer):
    """Keeps parameters, gradients and state in the file; FSDP2's groups are read just before they are gathered."""

    takes_gradients_early = True
    more_rows = NUM_LANDINGS

    def __init__(
        self, shards: Iterable[HeldParameter], build: Build, device: torch.device, disk: Disk, buffer_bytes: int
    ):
        _give_memory_back()
        super().__init__(shards, build, device, disk, buffer_bytes)
        self._landings = [Buffer(disk, self.row_bytes, 0, device, self.dtype) for _ in range(NUM_LANDINGS)]
        self._next_landing = itertools.cycle(self._landings)
        self._reader = _Reader(self)
        for shard in self.shards:
            self.write_row(shard.local, "parameter", shard.local.detach())
            shard.elsewhere.read = partial(self.read_row, shard.local, "parameter")
            shard.elsewhere.write = partial(self.write_row, shard.local, "parameter")
            shard.local.untyped_storage().resize_(0)

    def _rows(self) -> list[str]:
        return ["parameter", *self.names, "gradient"]

    def buffers(self) -> list[Buffer]:
        return [*self._buffers, *self._landings]

    @property
    def written_bytes(self) -> int:
        return self.group_bytes - self.row_bytes  # a gradient is over after the update

    def _master(self, local: nn.Parameter, start: int, stop: int) -> nn.Parameter:
        return nn.Parameter(torch.empty((1, 0) if local.ndim > 1 else (0,), dtype=local.dtype))

    def _bind(self, piece: Piece, buffer: Buffer) -> None:
        if piece.shard.elsewhere.gradient is None:
            piece.master.grad = None
            return
        piece.master.data = self._row(buffer, piece, "parameter").view(flat_shape(piece))
        piece.master.grad = self._row(buffer, piece, "gradient").view(flat_shape(piece))

    @torch.no_grad()
    def _send(self, shard: HeldParameter) -> None:
        gradient = shard.gradient_here
        if gradient is None:
            return
        shard.elsewhere.squared_norm = torch.linalg.vector_norm(gradient).double().square()
        for group, piece in self.pieces[shard.local]:
            landing = next(self._next_landing)
            landing.under_way.wait()
            landing.elements(0, 0, piece).copy_(gradient.reshape(-1)[piece.start : piece.stop])
            place, view = self.place(group, piece, "gradient")
            landing.under_way = self.file.write(place, landing.view[: len(view)])
        shard.elsewhere.gradient = partial(self._gradient, shard)
        shard.local.grad = shard.parameter.grad = None

    def _gradient(self, shard: HeldParameter) -> Tensor:
        self._settle()
        return self.read_row(shard.local, "gradient")

    def _settle(self) -> None:
        """Waits until all gradients are in the file."""
        for landing in self._landings:
            landing.under_way.wait()
            landing.under_way = NOTHING

    def _begin(self) -> None:
        super()._begin()
        self._settle()
        self._reader.forget()

    def serve(self, group: GatheredGroup, params: Served) -> None:
        """Lets the parameters of FSDP2's `group` be read before it gathers them, and forgotten afterwards."""
        self._reader.serve(group, params)


def _give_memory_back() -> None:
    """Makes glibc give memory back from 1 MiB on: blocks come and go, and it would keep freed memory of up to 32 MiB in
    its heaps, full of holes."""
    threshold, one_mib = -3, 2**20  # M_MMAP_THRESHOLD of malloc.h
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(threshold, one_mib)


class _Reader:
    """Reads parameters from the file into memory and forgets them, one FSDP2 group at a time."""

    def __init__(self, owner: NvmeModel):
        self.owner = owner
        self._ready: dict[
            int, tuple[Any, list[Tensor], Transfer]
        ] = {}  # by group: memory, its tensors, what is under way
        self._free: dict[int, list[Any]] = {}  # memory by size
        self._served: dict[int, Served] = {}
        self._after: dict[tuple[int, bool], int] = {}  # which group came next: after this one, forward or backward
        self._last: tuple[int, bool] | None = None

    def serve(self, group: GatheredGroup, params: Served) -> None:
        self._served[id(group)] = params
        empty = [param.rows for param, _ in params]
        alone = group.num_ranks == 1

        def reading(unshard: Callable[[bool], None]) -> Callable[..., None]:
            def read_and_unshard(async_op: bool = False) -> None:
                if group.will_gather:
                    self.start(id(group))
                    if not alone:  # it is copied into the collective's input now
                        self._put_rows(group)
                        self._look_ahead(id(group), group.in_backward)
                unshard(async_op)
                if not alone:
                    self._release(group, empty)

            return read_and_unshard

        def waiting(wait_for_unshard: Callable[[], None]) -> Callable[[], None]:
            def read_and_wait() -> None:
                if alone and group.gather_buffer is not None:
                    self._put_rows(group)
                    self._look_ahead(id(group), group.in_backward)
                wait_for_unshard()
                if alone:
                    self._release(group, empty)

            return read_and_wait

        group.replace_unshard(reading)
        group.replace_wait(waiting)

    def start(self, key: int) -> None:
        """Begins to read a group, unless that was done."""
        if key in self._ready or not self._served.get(key):
            return
        params, size = self._served[key], self.owner.dtype.itemsize
        lengths = [aligned(param.rows.numel() * size) for param, _ in params]
        free = self._free.get(sum(lengths), [])
        memory = free.pop() if free else new_buffer(sum(lengths))
        elements, view = self.owner.disk.tensor(memory).view(self.owner.dtype), memoryview(memory)
        tensors, blocks, first = [], [], 0
        for (param, shard), length in zip(params, lengths, strict=True):
            at = first
            for group, piece in self.owner.pieces[shard.local]:
                place, part = self.owner.place(group, piece, "parameter")
                blocks += self.owner.file.read(place, view[at : at + len(part)]).blocks
                at += len(part)
            tensors.append(elements[first // size :][: param.rows.numel()])
            first += length
        self._ready[key] = memory, tensors, Transfer(blocks)

    def forget(self) -> None:
        """Forgets what was read ahead: it is older than the update that comes."""
        for memory, tensors, under_way in self._ready.values():
            under_way.wait()
            self._keep(memory, tensors)
        self._ready.clear()
        self._last = None

    def _put_rows(self, group: GatheredGroup) -> None:
        if id(group) in self._ready:
            _, tensors, under_way = self._ready[id(group)]
            under_way.wait()
            for (param, _), tensor in zip(self._served[id(group)], tensors, strict=True):
                param.rows = tensor

    def _release(self, group: GatheredGroup, empty: list[Tensor]) -> None:
        if id(group) not in self._ready:
            return
        memory, tensors, under_way = self._ready.pop(id(group))
        under_way.wait()
        for (param, _), tensor in zip(self._served[id(group)], empty, strict=True):
            param.rows = tensor
        self._keep(memory, tensors)

    def _keep(self, memory: Any, tensors: list[Tensor]) -> None:
        tensors.clear()
        self._free.setdefault(len(memory), []).append(memory)

    def _look_ahead(self, key: int, is_backward: bool) -> None:
        """Reads the group that came after this one in the last pass of the same direction, while this one computes."""
        here = (key, is_backward)
        if self._last is not None and self._last != here:
            self._after[self._last] = key
        self._last = here
        if here in self._after:
            self.start(self._after[here])
