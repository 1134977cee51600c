"""Defines what `shardwise launch explain` finds, and what is a mistake in batch scripts and manifests alike."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

HIDDEN = re.compile(r"(?:^|_)(?:TOKEN|API_?KEY|SECRET|SECRET_ACCESS_KEY|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
"""Names of variables whose values only their owner may know."""

LOOPBACK = re.compile(r"^(?:localhost|127\.[\d.]+|::1|0\.0\.0\.0)$", re.IGNORECASE)
LOCAL_PLACES = re.compile(
    r"^(?:/tmp|/var/tmp|/dev/shm|/scratch/local|/local(?:scratch)?|/localdisk|/mnt/nvme\w*)(?:/|$)"
    r"|^\$\{?(?:TMPDIR|TMP|SLURM_TMPDIR|LOCALSCRATCH|PBS_JOBFS|JOBFS)\b"
)
"""Directories that every node has one of its own of."""


@dataclass(frozen=True)
class Mistake:
    """One mistake of a script, with the line where it is, or where it would have to be mended."""

    line: int
    what: str
    why: str
    fix: str


def local_run_dir(line: int, path: str) -> Iterator[Mistake]:
    """Yields a mistake if runs go to a directory that nodes do not share and that goes away with the job."""
    if LOCAL_PLACES.search(path.strip("\"'")):
        yield Mistake(
            line,
            f"runs go to {path}, which every node has for itself",
            "checkpoints are gone with the job, and a restart on other nodes begins at step 0",
            "run.dir=DIRECTORY on storage that all nodes see",
        )


def loopback_head(line: int, name: str, value: str) -> Iterator[Mistake]:
    """Yields a mistake if a variable says that node 0 is the machine that asks."""
    if name in ("MASTER_ADDR", "SHARDWISE_HEAD", "PET_MASTER_ADDR") and LOOPBACK.match(value.strip("\"'")):
        yield Mistake(
            line,
            f"{name} is {value}",
            "each node then looks for node 0 on itself: every node trains alone, or waits for the others for ever",
            f"{name}=ADDRESS of node 0 as the others reach it, or leave it to `shardwise train`",
        )


def written_secret(line: int, name: str, value: str) -> Iterator[Mistake]:
    """Yields a mistake if the value of a secret variable stands in the text."""
    value = value.strip("\"'")
    if HIDDEN.search(name) and value and not value.startswith(("$", "/", "<")) and not value.endswith(":"):
        yield Mistake(
            line,
            f"the value of {name} is written in here",
            "whoever can read the script or list jobs has it",
            "keep it in a file with mode 0600, or in a Secret, and name that",
        )


def not_resumed(line: int, command: str) -> Iterator[Mistake]:
    """Yields a mistake if the line that starts after every restart does not go on from a checkpoint."""
    if re.search(r"\btrain\b", command) and not re.search(r"--resume[= ]+auto\b", command):
        yield Mistake(
            line,
            "the line that trains has no --resume auto",
            "after a requeue or a replaced pod it starts a second run at step 0 in place of going on",
            "shardwise train PLAN.toml run.dir=SHARED --resume auto",
        )
