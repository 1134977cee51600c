"""How fast one node sends to another, over one connection that has shown the job's secret.

The receiver counts bytes in windows of a twentieth of a second and answers with the median window: a burst that a
limited link lets through at first does not count, nor does a moment in which a processor was busy elsewhere. One
connection through Python reaches about a gigabyte per second, so what is found is "at least", and compared between
nodes of one job only.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from contextlib import suppress

from shardwise.launch.nodes.connection import Stranger, framed, greet, let_in, read_frame

BLOCK = bytes(2**18)
BUFFER = 2**22
SEND_S = 0.6  # seconds that one measurement takes
WARM_S = 0.1  # of these, not counted
WINDOW_S = 0.05
CONNECT_S = 5.0
ANSWER_S = 30.0  # a slow link has a buffer to empty; one that is cut takes nothing any more


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Counts what comes, and answers with bytes per second when the other side has sent all."""
    counts, began, window, seen = [], time.perf_counter(), 0, 0
    while data := await reader.read(2**20):
        at = time.perf_counter() - began
        if int(at / WINDOW_S) != window:
            counts += [seen, *[0] * (int(at / WINDOW_S) - window - 1)]
            window, seen = int(at / WINDOW_S), 0
        seen += len(data)
    counted = counts[int(WARM_S / WINDOW_S) :] or [seen]
    writer.write(framed({"kind": "rate", "bytes_per_s": statistics.median(counted) / WINDOW_S}))
    with suppress(OSError):
        await writer.drain()
    writer.close()


async def send_to(address: str, port: int, secret: bytes) -> float:
    """Sends for half a second to a node that answers, and returns the bytes per second that arrived there."""
    opening = asyncio.open_connection(address, port, limit=BUFFER)
    reader, writer = await asyncio.wait_for(opening, CONNECT_S)
    try:
        await greet(reader, writer, secret)
        async with asyncio.timeout(ANSWER_S):
            writer.write(framed({"kind": "stream"}))
            end = time.perf_counter() + SEND_S
            while time.perf_counter() < end:
                writer.write(BLOCK)
                await writer.drain()
            writer.write_eof()
            return float((await read_frame(reader)).words["bytes_per_s"])
    finally:
        writer.close()


class Receiver:
    """Answers other nodes that measure how fast they reach this one."""

    def __init__(self, address: str, secret: bytes):
        self.address, self.secret, self.port = address, secret, 0

    async def open(self) -> None:
        """Listens at a free port of the job's interface, which is then in `port`."""
        server = await asyncio.start_server(self._meet, self.address, 0, limit=BUFFER)
        self.port = int(server.sockets[0].getsockname()[1])

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await let_in(reader, writer, self.secret)
            if (await read_frame(reader)).words.get("kind") == "stream":
                await answer(reader, writer)
        except (Stranger, OSError, ValueError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
