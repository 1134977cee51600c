"""Point-to-point sends and receives between pipeline stages: activations go up, gradients come down.

Sends never wait, so no order of actions can deadlock. Tensors between two ranks arrive in the order they were sent,
and every rank knows that order because schedules are data: a receive is posted when its turn in the sender's order
has come.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardwise.parallel.mesh import Mesh
from shardwise.spec.actions import Action


class StageTensor(NamedTuple):
    """Names a tensor that one stage sends to another."""

    kind: str  # "x" activations, "g" gradients, "e" activations of held-out micro-batches
    stage: int  # that they are for
    microbatch: int


Table = tuple[tuple[Action, ...], ...]


def sent_by(action: Action, num_stages: int) -> StageTensor | None:
    """Returns what an action sends to another stage, or None."""
    if action.kind in _GOES_UP and action.stage + 1 < num_stages:
        return StageTensor(_GOES_UP[action.kind], action.stage + 1, action.microbatch)
    if action.kind in "BI" and action.stage > 0:
        return StageTensor("g", action.stage - 1, action.microbatch)
    return None


def needed_by(action: Action, num_stages: int) -> StageTensor | None:
    """Returns what an action must have received, or None."""
    if action.kind in _GOES_UP and action.stage > 0:
        return StageTensor(_GOES_UP[action.kind], action.stage, action.microbatch)
    if action.kind in "BI" and action.stage + 1 < num_stages:
        return StageTensor("g", action.stage, action.microbatch)
    return None


@lru_cache(maxsize=64)
def incoming(table: Table, owners: tuple[int, ...], here: int) -> dict[StageTensor, tuple[int, str]]:
    """Returns the (sender, kind) of every tensor that comes to rank `here` from another, in the sender's order: there
    is one queue per sender and kind."""
    found = {}
    for sender, actions in enumerate(table):
        for action in actions if sender != here else ():
            what = sent_by(action, len(owners))
            if what and owners[what.stage] == here:
                found[what] = (sender, what.kind)
    return found


class PointToPoint:
    """The sends and receives of one rank in one pass through a table of actions."""

    def __init__(self, mesh: Mesh, table: Table, owners: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype):
        self.mesh, self.owners, self.shape, self.dtype = mesh, owners, tuple(shape), dtype
        self.here = mesh.at.pp
        self.queue_of = incoming(table, owners, self.here)
        self.queues: dict[tuple[int, str], deque[StageTensor]] = {}
        for what, queue in self.queue_of.items():
            self.queues.setdefault(queue, deque()).append(what)
        self.posted: dict[StageTensor, tuple[Tensor, Any]] = {}
        self.kept: dict[StageTensor, Tensor] = {}  # from one stage of this rank to another
        self.sending: deque[tuple[Tensor, Any]] = deque()

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of one tensor; all have the same shape."""
        return math.prod(self.shape) * self.dtype.itemsize

    def leaves(self, what: StageTensor) -> bool:
        """Returns whether a tensor goes to another rank, not from one stage of this rank to the next."""
        return self.owners[what.stage] != self.here

    def arrives(self, what: StageTensor) -> bool:
        """Returns whether a tensor comes from another rank."""
        return what in self.queue_of

    def send(self, what: StageTensor, tensor: Tensor) -> None:
        """Starts to send a tensor; one for another stage of this rank is kept."""
        target = self.owners[what.stage]
        if target == self.here:
            self.kept[what] = tensor
            return
        while self.sending and self.sending[0][1].is_completed():
            self.sending.popleft()
        tensor = tensor.contiguous()
        lane = self._lane(what.kind, self.here, target)
        work = lane.send([tensor], target, _TAGS[what.kind])  # a place in the pipeline is a rank of its groups
        self.sending.append((tensor, work))  # the tensor must live until it has left

    def expect(self, what: StageTensor | None) -> None:
        """Posts the receive of a tensor, and first those of all tensors that its sender sends before it."""
        queue = self.queue_of.get(what) if what else None
        if queue is None or what in self.posted:
            return
        while self.queues[queue]:
            following = self.queues[queue].popleft()
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
            lane = self._lane(following.kind, queue[0], self.here)
            work = lane.recv([buffer], queue[0], _TAGS[following.kind])
            self.posted[following] = (buffer, work)
            if following == what:
                return

    def receive(self, what: StageTensor) -> Tensor:
        """Waits for a tensor and returns it."""
        if what in self.kept:
            return self.kept.pop(what)
        self.expect(what)
        buffer, work = self.posted.pop(what)
        work.wait()
        return buffer

    def flush(self) -> None:
        """Waits for all sends that were started."""
        for _, work in self.sending:
            work.wait()
        assert not self.posted and not self.kept, f"tensors that nobody used: {[*self.posted, *self.kept]}"

    def _lane(self, kind: str, sender: int, receiver: int) -> Any:
        """Returns the process group of a kind and a direction of sends. On CUDA the transfers of one communicator run
        one after the other: each kind and direction has its own, so that none waits behind one whose receive is not
        posted yet."""
        if not self.mesh.lanes:
            return self.mesh.pp
        assert kind != "e", "idle slots are filled on CPUs only: these sends have no lane"
        return self.mesh.lanes[2 * (kind == "g") + (sender < receiver)]


_TAGS = {"x": 0, "g": 1, "e": 2}
_GOES_UP = {"F": "x", "E": "e"}
