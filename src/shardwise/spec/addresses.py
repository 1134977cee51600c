"""Says what an address of data is, such as s3://bucket/text.jsonl, and keeps credentials out of what people and files
see.

Invariant: an address that holds a password, a key or a signature is refused before anything repeats it: run files keep
addresses. Who reads what is behind one is data/remote.py.
"""

from __future__ import annotations

import os
import re
from urllib.parse import SplitResult, parse_qsl, urlsplit

from shardwise.errors import UserError

SECRET = re.compile(r"sig|token|secret|passw|pwd|key|credential|auth|policy", re.IGNORECASE)
"""What names of values contain that only their owner may know."""

SHORTEST_SECRET = 8  # characters: a shorter value is found in innocent words


def is_address(name: str) -> bool:
    """Returns whether a source is an address and no path of this machine."""
    return "://" in name and not name.startswith(("file://", "local://"))


def check_address(name: str) -> None:
    """Refuses an address that holds credentials, or that is several in one."""
    parts = _parts(name)
    if "::" in name:
        raise UserError(
            f"cannot read {without_secrets(name)}",
            why="addresses inside of addresses (`::`) have no limits of size that could be kept",
            fix="give the plain address; .gz and .zst are unpacked by their names",
        )
    user = "" if parts.scheme == "github" else parts.netloc.rpartition("@")[0]  # github://owner:name@commit/file
    held = "a password" if ":" in user else ""
    names = [key for key, _ in parse_qsl(parts.query, keep_blank_values=True) if SECRET.search(key)]
    if held or names:
        raise UserError(
            f"{without_secrets(name)} is given with credentials",
            why=f"it holds {held or f'`{names[0]}`'}, and a run's files keep the address of its data",
            fix="put them where the storage's own tools look (environment, ~/.aws, ~/.netrc), or FSSPEC_S3_KEY=...",
        )


def _parts(name: str) -> SplitResult:
    try:
        return urlsplit(name)
    except ValueError as error:
        raise UserError(
            "an address that cannot be read", why=str(error), fix="write it as s3://bucket/text.jsonl"
        ) from None


def without_secrets(text: str) -> str:
    """Returns a text without what may be credentials in it: users and queries of addresses, and values of variables of
    the environment whose names say that they are secret."""
    text = re.sub(r"(\w://)[^/\s@'\"]*:[^/\s@'\"]*@", r"\1", text)
    text = re.sub(r"(\w://[^\s?'\"]*)\?[^\s'\")]*", r"\1", text)
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= SHORTEST_SECRET:
            text = text.replace(value, "***")
    return text
