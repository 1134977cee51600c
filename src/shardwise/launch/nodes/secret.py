"""Holds the secret of a job: 128 random bits that every node must show before anything it says is read.

Without one anybody on the network could join a job, or put values into the store at which its ranks meet. Invariant:
the secret itself never travels on the job's connections, stands in no script and is in no file that others may read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
import time
from pathlib import Path

from shardwise.errors import UserError
from shardwise.files import cannot_write

NUM_BYTES = 16
PATIENCE_S = 60.0  # for a shared file system to show the other nodes what the head has written


def new_secret() -> bytes:
    return secrets.token_bytes(NUM_BYTES)


def read_secret(file: Path) -> bytes:
    """Returns the secret that a file holds as hexadecimal digits."""
    try:
        text, mode = file.read_text(encoding="ascii").strip(), stat.S_IMODE(file.stat().st_mode)
        found = bytes.fromhex(text)
    except (OSError, ValueError) as error:
        raise UserError(
            f"the secret of this job cannot be read from {file}",
            why=str(error),
            fix=f"(umask 077; head -c {NUM_BYTES} /dev/urandom | od -An -tx1 | tr -d ' \\n' > {file})",
        ) from None
    if len(found) < NUM_BYTES:
        raise UserError(
            f"the secret in {file} is too short",
            why=f"it has {8 * len(found)} bits, and fewer than {8 * NUM_BYTES} can be guessed",
            fix=f"write {2 * NUM_BYTES} random hexadecimal digits into it",
        )
    if mode & 0o077:
        raise UserError(
            f"others can read the secret of this job in {file}",
            why=f"its mode is {mode:04o}",
            fix=f"chmod 600 {file}, and make a new secret: who has read it can join the job",
        )
    return found


def shared_secret(file: Path, is_head: bool) -> bytes:
    """Returns the secret of a job that was given none: the head writes a new one into a file on a shared file system,
    where the other nodes find it."""
    if is_head:
        made = new_secret()
        scratch = file.with_name(f"{file.name}.{os.getpid()}")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            scratch.unlink(missing_ok=True)
            with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(made.hex() + "\n")
            os.replace(scratch, file)
        except OSError as error:
            raise cannot_write(file, error) from None
        return made
    deadline = time.monotonic() + PATIENCE_S
    while not file.is_file():
        if time.monotonic() > deadline:
            raise UserError(
                "this job has no secret, without which no node is let in",
                why=f"SHARDWISE_SECRET_FILE is not set, and {file}, which the first node writes, did not appear here "
                f"within {PATIENCE_S:.0f} s: the run directory is not shared, or the first node has not started",
                fix="`shardwise launch` writes scripts that bring a secret; or set SHARDWISE_SECRET_FILE on every node",
            )
        time.sleep(0.2)
    return read_secret(file)


def proof(secret: bytes, role: str, challenge: bytes, own: bytes) -> bytes:
    """Returns what proves to know the secret: it answers the other side's challenge, for one role and one connection
    only."""
    return hmac.new(secret, role.encode() + b"|" + challenge + b"|" + own, hashlib.sha256).digest()


def holds(secret: bytes, role: str, challenge: bytes, own: bytes, shown: bytes) -> bool:
    """Returns whether a proof that was shown is right; how long it takes says nothing about the secret."""
    return hmac.compare_digest(proof(secret, role, challenge, own), shown)
