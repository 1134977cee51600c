"""Optimizer offload: the state lives in CPU memory and the update runs there, whatever device the model is on
(ZeRO-Offload).

Gradients go down on a stream of their own while backward still runs, each as soon as it is complete; updated
parameters come back group by group, while the CPU updates the next group. Invariant: between steps every master in
CPU memory equals the parameter on the device. Read next: optimizer.py, what this shares with the other kinds;
nvme.py, where state lies on a disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.optim.gradient_norm import squared_norms
from shardwise.optim.offload.optimizer import Build, HeldParameter, OffloadedOptimizer, Piece, UpdateGroup

GROUP_ELEMENTS = 2**24  # elements of parameters that are updated at a time: 64 MiB in fp32


class StreamingOptimizer(OffloadedOptimizer):
    """Has parameters on a device, master weights and state in pinned CPU memory."""

    takes_gradients_early = True

    def __init__(self, shards: Iterable[HeldParameter], build: Build, device: torch.device, master_dtype: torch.dtype):
        self.device, self.master_dtype = device, master_dtype
        on_cuda = device.type == "cuda"
        self._down = torch.cuda.Stream(device) if on_cuda else None
        self._up = torch.cuda.Stream(device) if on_cuda else None
        super().__init__(shards, build)
        self.landing = {id(shard.local): self._pinned(shard.local) for shard in self.shards}

    def about(self) -> str:
        held = sum(2 * shard.local.numel() * self.master_dtype.itemsize for shard in self.shards)
        return f"offload  masters and gradients, {held / 2**30:.1f} GiB, and optimizer state in pinned CPU memory"

    @torch.no_grad()
    def _send(self, shard: HeldParameter) -> None:
        gradient, there = shard.gradient_here, shard.elsewhere
        if gradient is None:
            return
        there.squared_norm = squared_norms([gradient])[0]
        landing = self.landing[id(shard.local)]
        with on_stream(self._down):
            landing.copy_(gradient, non_blocking=True)
        if self._down is not None:
            gradient.record_stream(self._down)
        there.gradient = partial(_arrived, landing, self._down and self._down.record_event())
        shard.local.grad = shard.parameter.grad = None

    def _make_groups(self, build: Build) -> Iterator[UpdateGroup]:
        pieces: list[Piece] = []
        for shard in self.shards:
            master = nn.Parameter(self._pinned(shard.local))
            with torch.no_grad():
                master.copy_(shard.local)
            pieces.append(Piece(shard, 0, master.numel(), master))
            if sum(piece.stop for piece in pieces) >= GROUP_ELEMENTS:
                yield UpdateGroup(pieces, build(piece.master for piece in pieces))
                pieces = []
        if pieces:
            yield UpdateGroup(pieces, build(piece.master for piece in pieces))

    def _pinned(self, local: nn.Parameter) -> Tensor:
        return torch.empty(local.shape, dtype=self.master_dtype, pin_memory=self.device.type == "cuda")

    def _fetch(self, number: int) -> None:
        for piece in self.groups[number].pieces:
            piece.master.grad = piece.shard.gradient

    def _give_back(self, number: int) -> None:
        with on_stream(self._up):
            for piece in self.groups[number].pieces:
                # In the master's format first: another one would be made on the CPU, while everybody waits.
                piece.shard.local.copy_(piece.master.to(self.device, non_blocking=True))
                piece.master.grad = None

    def _end(self) -> None:
        if self._up is not None:
            torch.cuda.current_stream(self.device).wait_stream(self._up)

    @torch.no_grad()
    def reload_masters(self) -> None:
        """Copies the parameters to the masters again; to be called after they were written from outside, by a
        checkpoint."""
        for group in self.groups:
            for piece in group.pieces:
                piece.master.copy_(piece.shard.local)


def _arrived(landing: Tensor, event: Any) -> Tensor:
    if event is not None:
        event.synchronize()
    return landing


def on_stream(stream: Any) -> AbstractContextManager[Any]:
    """Returns a context for work on another stream, which begins when what was launched so far on this one is done.
    Without a stream it does nothing."""
    if stream is None:
        return nullcontext()
    stream.wait_stream(torch.cuda.current_stream(stream.device))
    return torch.cuda.stream(stream)
