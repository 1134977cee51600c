"""Provides memory between a disk and a device: pinned where a GPU copies to and from it, aligned as direct transfers
want it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.optim.offload.cpu import on_stream
from shardwise.optim.offload.disk import ALIGNMENT, NOTHING, Transfer, new_buffer
from shardwise.optim.offload.optimizer import Piece


class Buffer:
    """Memory for one group: its state as the file has it, and behind it room for what comes from a GPU and goes
    back."""

    def __init__(self, group_bytes: int, scratch_bytes: int, device: torch.device, dtype: torch.dtype):
        size, on_gpu = group_bytes + scratch_bytes, device.type == "cuda"
        if on_gpu:  # pinned by torch, which also lets go of it
            room = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            memory = room[-room.data_ptr() % ALIGNMENT :][:size]
        else:
            memory = torch.frombuffer(new_buffer(size), dtype=torch.uint8)
        self.view = memoryview(memory.numpy())[:group_bytes]  # type: ignore[arg-type]
        self._memory = memory.view(dtype)
        self.under_way: Transfer = NOTHING
        self.stream: Any = torch.cuda.Stream(device) if on_gpu else None

    def elements(self, first_byte: int, place: int, piece: Piece) -> Tensor:
        """Returns a piece's elements of the row that begins at `first_byte`, as a view."""
        first = first_byte // self._memory.itemsize + place
        return self._memory[first : first + piece.stop - piece.start]

    def take(self, target: Tensor, source: Tensor, piece: Piece) -> None:
        """Starts to copy a piece of a tensor on the device into this buffer."""
        with on_stream(self.stream):
            target.copy_(source.detach().view(-1)[piece.start : piece.stop], non_blocking=True)

    def bring_back(self, target: Tensor, source: Tensor, piece: Piece) -> None:
        """Starts to copy a piece back to the device."""
        with on_stream(self.stream):
            target.detach().view(-1)[piece.start : piece.stop].copy_(source.view(-1), non_blocking=True)

    def wait_for_device(self) -> None:
        """Waits until all copies of this buffer are done."""
        if self.stream is not None:
            self.stream.synchronize()
