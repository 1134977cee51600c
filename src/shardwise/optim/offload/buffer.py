"""Provides the disk of a rank, and memory between it and a device: pinned where a GPU copies to and from it, aligned as
direct transfers want it."""

from __future__ import annotations

from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.optim.offload.cpu import on_stream
from shardwise.optim.offload.disk import ALIGNMENT, NOTHING, ScratchFile, Transfer, new_buffer
from shardwise.optim.offload.optimizer import Piece


class Disk:
    """Where a rank's scratch file lies, and how tensors see the memory that is read into. A rehearsal has another one,
    with no file and no values."""

    def __init__(self, directory: Path):
        self.directory = directory

    def new_file(self, num_bytes: int) -> ScratchFile:
        """Returns a new scratch file."""
        return ScratchFile(self.directory, num_bytes)

    def tensor(self, memory: mmap) -> Tensor:
        """Returns this memory as a tensor of bytes."""
        return torch.frombuffer(memory, dtype=torch.uint8)


class Buffer:
    """Memory for one group: its state as the file has it, and behind it room for what comes from a GPU and goes
    back."""

    def __init__(self, disk: Disk, group_bytes: int, scratch_bytes: int, device: torch.device, dtype: torch.dtype):
        size, on_gpu = group_bytes + scratch_bytes, device.type == "cuda"
        if on_gpu:  # pinned by torch, which also lets go of it
            room = torch.empty(size + ALIGNMENT, dtype=torch.uint8, pin_memory=True)
            memory = room[-room.data_ptr() % ALIGNMENT :][:size]
            view = memoryview(memory.numpy())  # type: ignore[arg-type]
        else:
            view = memoryview(whole := new_buffer(size))
            memory = disk.tensor(whole)
        self.view = view[:group_bytes]
        self.memory = memory.view(dtype)
        self.under_way: Transfer = NOTHING
        self.stream: Any = torch.cuda.Stream(device) if on_gpu else None

    def elements(self, first_byte: int, place: int, piece: Piece) -> Tensor:
        """Returns a piece's elements of the row that begins at `first_byte`, as a view."""
        first = first_byte // self.memory.itemsize + place
        return self.memory[first : first + piece.stop - piece.start]

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
