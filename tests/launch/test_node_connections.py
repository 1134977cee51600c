"""Nodes let each other in by the job's secret alone, and nothing that a stranger sends is read."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.launch.nodes import connection
from shardwise.launch.nodes.connection import Stranger, framed, greet, let_in, read_frame
from shardwise.launch.nodes.secret import new_secret, read_secret, shared_secret
from shardwise.launch.nodes.stream import Receiver, send_to

Visit = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[object]]


def met(secret: bytes, visit: Visit) -> tuple[object, list[object]]:
    """What a visitor of a listening head comes back with, and what the head has read or why it did not."""
    seen: list[object] = []

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await let_in(reader, writer, secret)
            seen.append((await read_frame(reader)).words)
        except (Stranger, ValueError, asyncio.IncompleteReadError) as error:
            seen.append(type(error).__name__)
        finally:
            writer.close()

    async def both() -> object:
        server = await asyncio.start_server(meet, "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        try:
            return await asyncio.wait_for(visit(reader, writer), 20)
        finally:
            writer.close()
            while not seen:
                await asyncio.sleep(0.01)
            server.close()

    return asyncio.run(both()), seen


def visiting(secret: bytes, content: bytes = framed({"kind": "node"})) -> Visit:
    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> object:
        try:
            await greet(reader, writer, secret)
        except Stranger as error:
            return str(error)
        writer.write(content)
        return "in"

    return visit


def test_who_knows_the_secret_is_let_in():
    secret = new_secret()
    assert met(secret, visiting(secret)) == ("in", [{"kind": "node"}])


def test_who_does_not_is_not_read():
    said, seen = met(new_secret(), visiting(new_secret()))
    assert "did not accept this job's secret" in str(said) and seen == ["Stranger"]


def test_a_proof_is_good_for_one_connection():
    """Who has recorded what an honest node sent cannot send it again: the head asks for something else each time."""
    secret, recorded = new_secret(), []

    async def honest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> object:
        write, before = writer.write, len(recorded)
        writer.write = lambda data: (recorded.append(data), write(data))[1]  # type: ignore[method-assign,assignment]
        await greet(reader, writer, secret)
        writer.write = write  # type: ignore[method-assign]
        writer.write(framed({"kind": "node"}))
        return len(recorded) - before

    assert met(secret, honest) == (1, [{"kind": "node"}])

    async def again(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> object:
        writer.write(recorded[0])
        return await reader.read()

    _, seen = met(secret, again)
    assert seen == ["Stranger"]


@pytest.mark.parametrize("garbage", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04" * 500, bytes(48)], ids=len)
def test_whatever_a_stranger_sends_changes_nothing(garbage: bytes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(connection, "PROVE_S", 0.3)

    async def visit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> object:
        writer.write(garbage)
        return await reader.read()

    _, seen = met(new_secret(), visit)
    assert seen == ["Stranger"]


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("!I", 2**31),
        struct.pack("!I", 4) + b"[1]]",
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", len(text := json.dumps({"size": 2**40}).encode())) + text,
        struct.pack("!I", len(text := b'{"size": "all"}')) + text,
    ],
    ids=["endless", "not JSON", "no object", "too many bytes", "size is a word"],
)
def test_a_frame_has_limits(content: bytes):
    secret = new_secret()
    _, seen = met(secret, visiting(secret, content))
    assert seen in (["ValueError"], ["JSONDecodeError"])


def test_a_node_measures_how_fast_it_reaches_another():
    secret = new_secret()

    async def measured(own: bytes) -> float:
        receiver = Receiver("127.0.0.1", secret)
        await receiver.open()
        return await send_to("127.0.0.1", receiver.port, own)

    assert asyncio.run(measured(secret)) > 1e6
    with pytest.raises(Stranger):
        asyncio.run(measured(new_secret()))


def test_a_secret_is_for_its_owner_alone(tmp_path: Path):
    file = tmp_path / "secret"
    for text, mode, what in (
        ("ab" * 16, 0o644, "others can read"),
        ("ab" * 8, 0o600, "too short"),
        ("xy", 0o600, "read"),
    ):
        file.write_text(text)
        file.chmod(mode)
        with pytest.raises(UserError, match=what):
            read_secret(file)
    file.write_text("ab" * 16 + "\n")
    assert read_secret(file) == b"\xab" * 16


def test_the_head_leaves_the_others_a_secret_on_a_shared_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "runs" / ".secret-job"
    made = shared_secret(file, is_head=True)
    assert shared_secret(file, is_head=False) == made and file.stat().st_mode & 0o077 == 0
    assert shared_secret(file, is_head=True) != made, "each start has a secret of its own"
    monkeypatch.setattr("shardwise.launch.nodes.secret.PATIENCE_S", 0.1)
    with pytest.raises(UserError, match="no secret") as error:
        shared_secret(tmp_path / "not-shared", is_head=False)
    assert "run directory is not shared" in error.value.why
