"""Counts what is really sent, in two independent ways; neither is a counter of ours inside `parallel/`.

    Wire          notes every operation that torch hands to a process group: its kind, the bytes of its
                  buffer, when and in which phase
    sent_bytes    what the system says this process has sent over TCP, gloo's headers included (Linux only)

A ring all-reduce of S bytes over N ranks makes each of them send 2(N-1)/N S, a gather or an exchange (N-1)/N S, a
send S.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.run.clock import Clock

KINDS = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "alltoall_base_": "all-to-all",
    "send": "send",
    "broadcast_": "broadcast",
}
IGNORED = ("recv_", "barrier")  # a receive is somebody else's send
SENT = struct.Struct("@QQ")  # tcpi_bytes_sent and tcpi_bytes_retrans, next to each other in Linux's struct tcp_info
SENT_OFFSET = 200


class WireOperation(NamedTuple):
    """One collective or send that torch handed to a process group."""

    kind: str
    num_bytes: int  # of the whole buffer: what is summed, what is there after a gather
    phase: str  # forward, backward, ...
    microbatch: int | None
    at_s: float  # seconds by the host's clock

    def share(self, world: int) -> float:
        """Returns the bytes that one of `world` ranks sends for it."""
        times = {"all-reduce": 2 * (world - 1) / world, "send": 1.0}
        return self.num_bytes * times.get(self.kind, (world - 1) / world)


class Wire(TorchDispatchMode):
    """Notes every operation of a process group while it is open as a context. It fails on a collective it does not
    know, rather than not counting it."""

    def __init__(self) -> None:
        super().__init__()
        self.transfers: list[WireOperation] = []
        self.phase = ""
        self.microbatch: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func._schema.name.removeprefix("c10d::")
            if name not in IGNORED:
                # An exchange is (output, input, ...), a gather (output, input, ...), the others ([tensors], ...).
                buffers = [args[0]] if isinstance(args[0], Tensor) else list(args[0])
                num_bytes = sum(buffer.nbytes for buffer in buffers)
                now = time.perf_counter()
                self.transfers.append(WireOperation(KINDS[name], num_bytes, self.phase, self.microbatch, now))
        return func(*args, **(kwargs or {}))


class PhaseClock(Clock):
    """The clock that a step is given anyway; here it also tells the wire which part of the step it is."""

    def __init__(self, wire: Wire):
        self.wire = wire
        super().__init__(torch.device("cpu"))

    def span(self, kind: str, name: str, microbatch: int | None = None, *about: Any, **more: Any) -> Any:
        if not self.open:
            self.wire.phase, self.wire.microbatch = name, microbatch
        return super().span(kind, name, microbatch, *about, **more)


def sent_bytes() -> int | None:
    """Returns the bytes that this process has sent over the sockets that are open now, repetitions left out; None where
    the system does not count."""
    if sys.platform != "linux":
        return None
    return sum(_sent_by(int(name)) for name in os.listdir("/proc/self/fd")) or None


def _sent_by(descriptor: int) -> int:
    """Returns the bytes that were sent over one descriptor; 0 if it is no TCP socket."""
    try:
        if not os.readlink(f"/proc/self/fd/{descriptor}").startswith("socket:"):
            return 0
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:  # closed meanwhile, or no TCP socket
        return 0
    if len(info) < SENT_OFFSET + SENT.size:  # an old kernel
        return 0
    sent, again = SENT.unpack_from(info, SENT_OFFSET)
    return int(sent - again)


def of_kind(transfers: Iterable[WireOperation], kind: str, *phases: str) -> list[WireOperation]:
    return [m for m in transfers if m.kind == kind and (not phases or m.phase in phases)]


def total(transfers: Iterable[WireOperation]) -> int:
    """Returns the bytes of all these buffers together."""
    return sum(transfer.num_bytes for transfer in transfers)
