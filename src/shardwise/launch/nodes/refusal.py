"""Puts what ends one node's part of a job into words for the other nodes, which leave with the same exit code."""

from __future__ import annotations

import socket
from typing import Any

from shardwise.errors import Exit, UserError
from shardwise.files import refused
from shardwise.launch.nodes.connection import Frame


def refusal_of(error: BaseException) -> dict[str, Any]:
    """Returns what the other nodes are told of an error or a signal: three lines, and the code with which this node
    leaves."""
    problem = _in_three_lines(error)
    return {"text": str(problem), "exit": int(problem.code)}


def refused_by(node: str, frame: Frame) -> UserError:
    """Returns the error that a node has reported, with its name in front."""
    lines = [line.strip() for line in str(frame.words.get("text", "")).splitlines()]
    what, why, fix = [*lines, "it gave no reason", "", ""][:3] if len(lines) != 3 else lines
    return UserError(
        f"{node}: {what.removeprefix('error:').strip()}",
        why=why.removeprefix("why").strip(),
        fix=fix.removeprefix("fix").strip(),
        code=Exit(int(frame.words.get("exit", Exit.USER_MISTAKE))),
    )


def _in_three_lines(error: BaseException) -> UserError:
    if isinstance(error, UserError):
        return error
    if isinstance(error, OSError):
        return refused(error)
    host = socket.gethostname()
    if isinstance(error, Exception):
        return UserError(
            f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}",
            why=f"this is a bug of shardwise; {host} has the details",
            fix="please report it with what was printed there",
            code=Exit.BUG,
        )
    is_ctrl_c = isinstance(error, KeyboardInterrupt)
    return UserError(
        f"stopped by {'Ctrl-C' if is_ctrl_c else 'SIGTERM'} on {host} before the ranks started",
        why="a job ends on all its nodes together",
        fix="start it again: it goes on from the last checkpoint, if there is one",
        code=Exit.INTERRUPTED if is_ctrl_c else Exit.STOPPED,
    )
