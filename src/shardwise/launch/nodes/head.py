"""The rendezvous of a job of several nodes: the head lets the other nodes in, and passes their ranks on to the store.

It listens at one address of the job's interface. torch's store, which anybody could read and write, listens on this
node's loopback interface alone; ranks of other nodes reach it through connections that have shown the job's secret.
Invariant: who does not know the secret is heard for ten seconds at most and changes nothing.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from shardwise.errors import Exit, UserError
from shardwise.launch.nodes.connection import (
    PROVE_S,
    Background,
    NodeLink,
    Stranger,
    framed,
    let_in,
    pump,
    read_frame,
)

BACKLOG = 4096  # ranks of many nodes come at once
MOST_KNOCKING = 256  # connections of one address that have not shown the secret: a node has fewer ranks
LOOPBACK = "127.0.0.1"


class JobHead:
    """Listens for the other nodes of a job. Used as a context: at its end nothing listens any more."""

    def __init__(self, address: str, port: int, count: int, secret: bytes | Callable[[], bytes]):
        """`port` 0 takes any that is free. A function that writes the secret for the others is called when the port is
        this job's: one that cannot have it must not replace the secret of the job that has."""
        self.count = count
        self.store_port = 0  # where this node's store listens, once there is one
        self.links: dict[int, NodeLink] = {}
        self.hellos: dict[int, dict[str, Any]] = {}
        self.strangers: deque[str] = deque(maxlen=3)  # who tried without the secret, the last ones
        self._knocking: Counter[str] = Counter()  # connections from each address that have shown nothing yet
        self._listener = _listen(address, port)
        try:
            self.secret = secret if isinstance(secret, bytes) else secret()
        except BaseException:
            self._listener.close()
            raise
        self.address, self.port = self._listener.getsockname()[:2]
        self.thread = Background()
        self._server = self.thread.call(self._serve())

    def __enter__(self) -> JobHead:
        return self

    def __exit__(self, *error: object) -> None:
        flushing = [threading.Thread(target=link.flush) for link in self.links.values() if not link.lost]
        for thread in flushing:
            thread.start()
        for thread in flushing:
            thread.join()
        self.thread.close()
        with suppress(OSError):
            self._listener.close()

    async def _serve(self) -> asyncio.Server:
        return await asyncio.start_server(self._meet, sock=self._listener, backlog=BACKLOG)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = str((writer.get_extra_info("peername") or ("?",))[0])
        if self._knocking[peer] >= MOST_KNOCKING:
            writer.close()
            return
        self._knocking[peer] += 1
        try:
            await let_in(reader, writer, self.secret)
            async with asyncio.timeout(PROVE_S):
                first = (await read_frame(reader)).words
        except (Stranger, OSError, ValueError, RecursionError, asyncio.IncompleteReadError) as error:
            self.strangers.append(f"{peer}: {error}")
            writer.close()
            return
        finally:
            self._knocking[peer] -= 1
        if first.get("kind") == "store":
            await self._join_store(reader, writer)
            return
        index = first.get("index")
        if first.get("kind") == "node" and isinstance(index, int) and 0 < index < self.count:
            if (before := self.links.get(index)) is not None and not before.lost:
                writer.write(framed({"kind": "refuse", "text": _twice(index, self.hellos[index], first)}))
                writer.close()
                return
            link = NodeLink(self.thread, reader, writer)
            self.hellos[index], self.links[index] = first, link
            await link.listen()
        else:
            writer.close()

    async def _join_store(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            store_reader, store_writer = await asyncio.open_connection(LOOPBACK, self.store_port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, store_writer), pump(store_reader, writer))

    def tell(self, kind: str, data: bytes = b"", **words: Any) -> None:
        """Sends a frame to every other node."""
        for link in list(self.links.values()):
            link.send(kind, data, **words)


def _listen(address: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen(BACKLOG)  # two sockets may be bound to one port; only one may listen
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        raise UserError(
            f"the head of this job cannot listen at {address} port {port}",
            why="another program, or another job on this node, listens there" if is_taken else str(error),
            fix=f"SHARDWISE_PORT={port + 1} on every node" if is_taken else "comm.interface=NAME takes another address",
            code=Exit.HARDWARE,
        ) from None
    return listener


def _twice(index: int, first: dict[str, Any], second: dict[str, Any]) -> str:
    problem = UserError(
        f"two processes say that they are node {index} of this job: on {first.get('host')} and {second.get('host')}",
        why="each node starts `shardwise train` once; with one task per GPU the scheduler says so itself",
        fix="one task per node (srun --ntasks-per-node=1), or SHARDWISE_NODE=0, 1, ... on each",
    )
    return str(problem)
