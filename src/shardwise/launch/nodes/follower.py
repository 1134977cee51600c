"""A node's way to the head: a connection for what the two agents say to each other, and a tunnel from ranks to the
store.

The tunnel listens on this node's loopback interface only and passes bytes on through a connection that has shown the
job's secret; ranks use it as if the store were here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from shardwise.errors import Exit, UserError
from shardwise.launch.nodes.connection import Background, NodeLink, Stranger, framed, greet, pump
from shardwise.launch.nodes.interfaces import reachable

LOOPBACK = "127.0.0.1"
TRY_EVERY_S = 0.3
STRANGER_S = 15.0  # seconds in which the head of an earlier attempt has ended


class Follower:
    """One node's connection to the head. Used as a context: at its end nothing listens any more."""

    def __init__(
        self,
        heads: Sequence[str],
        port: int,
        secret: bytes,
        hello: dict[str, Any],
        patience_s: float,
        newer: Callable[[], bytes] | None = None,
    ):
        """Tries the head's addresses in turn for `patience_s` seconds: it may not have started yet. `newer` returns the
        secret anew where it is in a file that the head writes: what was read may be that of a start before."""
        self.secret, self.port, self._newer = secret, port, newer
        self.thread = Background()
        try:
            self.address, reader, writer = self._reach(heads, patience_s)
        except BaseException:
            self.thread.close()
            raise
        self.link = NodeLink(self.thread, reader, writer)
        self.link.send("node", **hello)
        asyncio.run_coroutine_threadsafe(self.link.listen(), self.thread.loop)
        self._tunnel: asyncio.Server | None = None

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *error: object) -> None:
        self.link.flush()
        self.thread.close()

    def _reach(self, heads: Sequence[str], patience_s: float) -> tuple[str, asyncio.StreamReader, asyncio.StreamWriter]:
        began, said, stranger = time.monotonic(), "nobody knows a name of it", ""
        while True:
            for address in reachable(heads):
                try:
                    return address, *self.thread.call(self._connect(address))
                except Stranger as error:  # perhaps the head of an earlier attempt, which is about to end
                    stranger, said = address, str(error)
                    self.secret = self._newer() if self._newer else self.secret
                except (OSError, TimeoutError) as error:
                    said = f"{address} port {self.port}: {error or type(error).__name__}"
            waited = time.monotonic() - began
            if stranger and waited > min(STRANGER_S, patience_s):
                raise _not_ours(stranger, self.port, said)
            if waited > patience_s:
                raise UserError(
                    f"the first node of this job did not answer within {patience_s:.0f} s",
                    why=f"tried {', '.join(heads) or 'nothing: no address is known'}; {said}",
                    fix="see whether it runs and whether a firewall closes the port; SHARDWISE_HEAD=ADDRESS and "
                    "SHARDWISE_PORT=PORT name another",
                    code=Exit.HARDWARE,
                )
            time.sleep(TRY_EVERY_S)

    async def _connect(self, address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, self.port), 5.0)
        try:
            await greet(reader, writer, self.secret)
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def open_tunnel(self) -> int:
        """Returns a port of this node's loopback interface behind which the head's store is."""
        if self._tunnel is None:  # ranks that are started again come by the same way
            self._tunnel = self.thread.call(asyncio.start_server(self._pass_on, LOOPBACK, 0))
        return int(self._tunnel.sockets[0].getsockname()[1])

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head_reader, head_writer = await self._connect(self.address)
        except (OSError, TimeoutError, Stranger):
            writer.close()
            return
        head_writer.write(framed({"kind": "store"}))
        with suppress(OSError):
            await asyncio.gather(pump(reader, head_writer), pump(head_reader, writer))


def _not_ours(address: str, port: int, said: str) -> UserError:
    return UserError(
        f"{address} port {port} is not the head of this job",
        why=said,
        fix="another job may use this port: SHARDWISE_PORT=PORT on every node; all nodes need the same secret file",
        code=Exit.HARDWARE,
    )
