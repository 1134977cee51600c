"""Connections between the nodes of a job: each side proves to know the job's secret, then they exchange frames.

    head                                              node
    SHARDWISE 1, 16 random bytes               ->
                                               <-     16 random bytes, HMAC(secret, "node", both)
    HMAC(secret, "head", both)                 ->
    frames: the length of a JSON object, the object; it may announce `size` bytes that follow

Before the proof nothing is read but those 48 bytes, within ten seconds. Invariant: nothing that comes over a connection
is unpickled or executed, and no frame makes this process hold more than `MOST_JSON` + `MOST_BYTES`. What is sent is not
encrypted: who can read along on the network of a job reads its configs, logs and checkpoints, but not the secret.
"""

from __future__ import annotations

import asyncio
import errno
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from shardwise.launch.nodes.secret import holds, proof

GREETING = b"SHARDWISE 1\n"
CHALLENGE_BYTES, PROOF_BYTES = 16, 32
PROVE_S = 10.0  # seconds that a stranger may hold a connection
MOST_JSON = 2**24
MOST_BYTES = 2**24
LOST_AFTER_S = 30
"""Seconds after which a machine that does not answer is taken for lost: one without power closes no connection. Kernels
ask each other, so a process that cannot speak, while it loads torch from a slow disk for instance, is not lost."""
PROBE_EVERY_S = 5
ALIVE_EVERY_S = 10.0
STUCK_AFTER_S = 300.0
"""Seconds without a word of a process after which it is taken for lost though its machine answers."""
UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)

Result = TypeVar("Result")


class Stranger(Exception):
    """Is raised where the other side does not know the job's secret."""


class Frame(NamedTuple):
    """One message: a JSON object, and bytes that belong to it."""

    words: dict[str, Any]
    data: bytes = b""


class Background:
    """An event loop in a thread of its own, in which the connections of a node live."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="nodes", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, Result], timeout: float | None = None) -> Result:
        """Runs a coroutine there and returns what it returns."""
        waiting: Future[Result] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return waiting.result(timeout)

    def close(self) -> None:
        """Ends the loop; connections that are open are dropped."""
        with suppress(RuntimeError, TimeoutError):
            self.call(_cancel_others(), 5.0)
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5.0)


async def _cancel_others() -> None:
    """Ends what still runs in this loop: a task that is left behind complains of it at the program's end. So do
    connections whose task is cancelled, on Python 3.11: by now there is nobody to tell."""
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def let_in(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """The head's side of the greeting. Raises `Stranger` for whoever does not know the secret."""
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    writer.write(GREETING + challenge)
    try:
        async with asyncio.timeout(PROVE_S):
            answer = await reader.readexactly(CHALLENGE_BYTES + PROOF_BYTES)
    except (TimeoutError, asyncio.IncompleteReadError, OSError) as error:
        raise Stranger(str(error) or "it said nothing in time") from None
    own, shown = answer[:CHALLENGE_BYTES], answer[CHALLENGE_BYTES:]
    if not holds(secret, "node", challenge, own, shown):
        raise Stranger("it does not know the job's secret")
    writer.write(proof(secret, "head", own, challenge))


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes) -> None:
    """A node's side of the greeting. Raises `Stranger` where something else than this job's head answers."""
    try:
        async with asyncio.timeout(PROVE_S):
            greeting = await reader.readexactly(len(GREETING) + CHALLENGE_BYTES)
            if not greeting.startswith(GREETING):
                raise Stranger("what listens there is no head of a job, or of another version")
            challenge, own = greeting[len(GREETING) :], secrets.token_bytes(CHALLENGE_BYTES)
            writer.write(own + proof(secret, "node", challenge, own))
            shown = await reader.readexactly(PROOF_BYTES)
    except asyncio.IncompleteReadError:
        raise Stranger("the head did not accept this job's secret") from None
    if not holds(secret, "head", own, challenge, shown):
        raise Stranger("what listens there does not know this job's secret")


async def read_frame(reader: asyncio.StreamReader) -> Frame:
    """Returns the next frame. Raises IncompleteReadError at the end, ValueError for what is no frame."""
    (length,) = struct.unpack("!I", await reader.readexactly(4))
    if length > MOST_JSON:
        raise ValueError(f"a frame of {length} bytes")
    words = json.loads(await reader.readexactly(length))
    if not isinstance(words, dict):
        raise ValueError("a frame is no object")
    size = words.get("size", 0)
    if not isinstance(size, int) or not 0 <= size <= MOST_BYTES:
        raise ValueError(f"a frame announces {size} bytes")
    return Frame(words, await reader.readexactly(size) if size else b"")


def framed(words: dict[str, Any], data: bytes = b"") -> bytes:
    """Returns a frame as bytes."""
    text = json.dumps(words | ({"size": len(data)} if data else {})).encode()
    return struct.pack("!I", len(text)) + text + data


class NodeLink:
    """The connection between the head and another node, as the program's own thread uses it: frames wait in `inbox`."""

    def __init__(self, thread: Background, reader: asyncio.StreamReader, writer: asyncio.StreamWriter):
        self._loop, self._reader, self._writer = thread.loop, reader, writer
        _have_kernel_watch(writer.get_extra_info("socket"))
        self.inbox: queue.Queue[Frame] = queue.Queue()
        self.heard_at = self._beaten_at = time.monotonic()
        self.closed = ""  # why nothing more will come
        self.ended = False  # the other side has said that it leaves

    @property
    def lost(self) -> str:
        """Why the other side is taken for lost; empty while it is there."""
        if self.closed:
            return self.closed
        silence = self._beaten_at - self.heard_at  # time in which this process itself stood still is no silence
        if silence <= STUCK_AFTER_S:
            return ""
        return f"its machine answers, but its process has said nothing for {silence:.0f} s"

    def send(self, kind: str, data: bytes = b"", **words: Any) -> None:
        """Sends a frame, as soon as the connection takes it. To a side that is gone nothing is sent."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._write, framed({"kind": kind, **words}, data))

    def answer(self, words: dict[str, Any]) -> None:
        """Sends a frame that has its kind already."""
        self.send(**words)

    def _write(self, content: bytes) -> None:
        if not self.closed:
            self._writer.write(content)

    @property
    def num_unsent_bytes(self) -> int:
        """What waits here because the connection does not take it."""
        return self._writer.transport.get_write_buffer_size()

    def next(self) -> Frame | None:
        """Returns the next frame, None if there is none yet."""
        with suppress(queue.Empty):
            return self.inbox.get_nowait()
        return None

    def receive(self, *kinds: str, timeout: float) -> Frame | None:
        """Returns the next frame of these kinds; None when none came in time or the other side is lost. Frames of other
        kinds before it are dropped."""
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            with suppress(queue.Empty):
                frame = self.inbox.get(timeout=min(left, 0.2))
                if frame.words.get("kind") in kinds:
                    return frame
                continue
            if self.lost:
                return None
        return None

    async def listen(self) -> None:
        """Puts frames into the inbox until the other side is gone, and says now and then that this side is there."""
        beating = asyncio.ensure_future(self._beat())
        try:
            while True:
                frame = await read_frame(self._reader)
                self.heard_at = time.monotonic()
                if frame.words.get("kind") != "alive":
                    self.inbox.put(frame)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.closed = "its connection was closed"
        except (OSError, ValueError, RecursionError) as error:
            is_silent = isinstance(error, OSError) and error.errno in UNREACHABLE
            silence = f"its machine has not answered for {LOST_AFTER_S} s"
            self.closed = silence if is_silent else str(error) or type(error).__name__
        finally:
            beating.cancel()
            self._writer.close()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(ALIVE_EVERY_S)
            self._beaten_at = time.monotonic()
            self._write(framed({"kind": "alive"}))

    def flush(self, timeout: float = 5.0) -> None:
        """Waits until what was sent has left."""
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._empty(), self._loop).result(timeout)

    async def _empty(self) -> None:
        self._writer.transport.set_write_buffer_limits(0)  # else a few kB may wait on, and nobody sends them
        await self._writer.drain()


def _have_kernel_watch(connection: socket.socket) -> None:
    """Has this machine's kernel ask the other's whether it is there, and close the connection when it is not."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, PROBE_EVERY_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * LOST_AFTER_S)  # also of what was sent


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Passes bytes on until one side ends."""
    with suppress(OSError, asyncio.IncompleteReadError):
        while data := await reader.read(2**16):
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        writer.close()
