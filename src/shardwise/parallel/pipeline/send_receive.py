"""Messages between pipeline stages: activations go up, gradients come down.

Sends never wait, so no order of actions can deadlock. Messages between two ranks arrive in the order they were sent,
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


class Message(NamedTuple):
    kind: str  # "x" activations, "g" gradients, "e" activations of held-out micro-batches
    stage: int  # that they are for
    microbatch: int


Table = tuple[tuple[Action, ...], ...]


def message_of(action: Action, num_stages: int) -> Message | None:
    """What an action hands on to another stage."""
    if action.kind in _GOES_UP and action.stage + 1 < num_stages:
        return Message(_GOES_UP[action.kind], action.stage + 1, action.microbatch)
    if action.kind in "BI" and action.stage > 0:
        return Message("g", action.stage - 1, action.microbatch)
    return None


def needed_by(action: Action, num_stages: int) -> Message | None:
    """What an action waits for."""
    if action.kind in _GOES_UP and action.stage > 0:
        return Message(_GOES_UP[action.kind], action.stage, action.microbatch)
    if action.kind in "BI" and action.stage + 1 < num_stages:
        return Message("g", action.stage, action.microbatch)
    return None


@lru_cache(maxsize=64)
def incoming(table: Table, owners: tuple[int, ...], here: int) -> dict[Message, tuple[int, str]]:
    """Every message from elsewhere, in its sender's order -> (sender, kind): one queue per sender and kind."""
    found = {}
    for sender, actions in enumerate(table):
        for action in actions if sender != here else ():
            message = message_of(action, len(owners))
            if message and owners[message.stage] == here:
                found[message] = (sender, message.kind)
    return found


class Mailbox:
    """One pass of one rank through a table of actions."""

    def __init__(self, mesh: Mesh, table: Table, owners: tuple[int, ...], shape: Sequence[int], dtype: torch.dtype):
        self.mesh, self.owners, self.shape, self.dtype = mesh, owners, tuple(shape), dtype
        self.here = mesh.at.pp
        self.queue_of = incoming(table, owners, self.here)
        self.queues: dict[tuple[int, str], deque[Message]] = {}
        for message, queue in self.queue_of.items():
            self.queues.setdefault(queue, deque()).append(message)
        self.posted: dict[Message, tuple[Tensor, Any]] = {}
        self.kept: dict[Message, Tensor] = {}  # from one stage of this rank to another
        self.sending: deque[tuple[Tensor, Any]] = deque()

    @property
    def num_bytes(self) -> int:
        """Of one message."""
        return math.prod(self.shape) * self.dtype.itemsize

    def leaves(self, message: Message) -> bool:
        """It goes to another rank, not from one stage of this one to the next."""
        return self.owners[message.stage] != self.here

    def arrives(self, message: Message) -> bool:
        return message in self.queue_of

    def send(self, message: Message, tensor: Tensor) -> None:
        target = self.owners[message.stage]
        if target == self.here:
            self.kept[message] = tensor
            return
        while self.sending and self.sending[0][1].is_completed():
            self.sending.popleft()
        tensor = tensor.contiguous()
        lane = self._lane(message.kind, self.here, target)
        work = lane.send([tensor], target, _TAGS[message.kind])  # a place in the pipeline is a rank of its groups
        self.sending.append((tensor, work))  # the tensor must live until it has left

    def expect(self, message: Message | None) -> None:
        """Post its receive, and first those of everything its sender sends before."""
        queue = self.queue_of.get(message) if message else None
        if queue is None or message in self.posted:
            return
        while self.queues[queue]:
            following = self.queues[queue].popleft()
            buffer = torch.empty(self.shape, dtype=self.dtype, device=self.mesh.device)
            lane = self._lane(following.kind, queue[0], self.here)
            work = lane.recv([buffer], queue[0], _TAGS[following.kind])
            self.posted[following] = (buffer, work)
            if following == message:
                return

    def receive(self, message: Message) -> Tensor:
        if message in self.kept:
            return self.kept.pop(message)
        self.expect(message)
        buffer, work = self.posted.pop(message)
        work.wait()
        return buffer

    def flush(self) -> None:
        for _, work in self.sending:
            work.wait()
        assert not self.posted and not self.kept, f"messages that nobody used: {[*self.posted, *self.kept]}"

    def _lane(self, kind: str, sender: int, receiver: int) -> Any:
        """On CUDA, messages of one communicator run one after the other: each kind and direction has its own, so that
        none waits behind one that its peer has not asked for yet."""
        if not self.mesh.lanes:
            return self.mesh.pp
        assert kind != "e", "idle slots are filled on CPUs only: these messages have no lane"
        return self.mesh.lanes[2 * (kind == "g") + (sender < receiver)]


_TAGS = {"x": 0, "g": 1, "e": 2}
_GOES_UP = {"F": "x", "E": "e"}
