"""Hands a script to its scheduler's own command, and nothing else: what is submitted is what would be printed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from shardwise.errors import Exit, UserError
from shardwise.files import cannot_write

HOW_TO_GET = {
    "sbatch": "log in to a node of the cluster, or write the script with --out and submit it there",
    "kubectl": "install kubectl and its access to the cluster, or write the manifest with --out",
    "ray": "pip install 'shardwise[ray]'",
    "ssh": "install an ssh client",
}


def command_of(name: str) -> str:
    """Returns the path of a scheduler's command, or refuses."""
    if found := shutil.which(name):
        return found
    raise UserError(
        f"there is no `{name}` here", why="--submit hands the job to the scheduler's own command", fix=HOW_TO_GET[name]
    )


def submit(words: Sequence[str], text: str = "") -> str:
    """Runs a scheduler's command with `text` on its standard input and returns what it prints. What it complains about
    is passed on, with its first line as the error."""
    done = subprocess.run([command_of(words[0]), *words[1:]], input=text, capture_output=True, text=True)
    if done.returncode == 0:
        return done.stdout.strip()
    said = (done.stderr or done.stdout).strip()
    print(said, file=sys.stderr)
    raise UserError(
        f"{words[0]} did not take the job",
        why=next(iter(said.splitlines()), f"it ended with exit code {done.returncode}"),
        fix="change what it names; without --submit the script is printed",
        code=Exit.USER_MISTAKE,
    )


def write_script(path: Path, text: str, is_program: bool) -> None:
    """Writes a script or a manifest that only its owner may read: it says where data and runs are, and what is added to
    it by hand may be secret."""
    try:
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700 if is_program else 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise cannot_write(path, error) from None
