"""Lists which checkpoints a run has. It imports no torch, so that listing costs nothing. Read next: manifest.py."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.errors import UserError

MANIFEST = "manifest.json"


def committed(parent: Path) -> list[Path]:
    """Returns the directories of committed checkpoints, newest first."""
    found = {path: step_of(path) for path in parent.glob("step-*") if (path / MANIFEST).is_file()}
    return sorted((path for path, step in found.items() if step is not None), key=lambda path: -(found[path] or 0))


def at_step(parent: Path, step: int) -> Path:
    """Returns the committed checkpoint of a certain step, which must be there."""
    found = committed(parent)
    for path in found:
        if step_of(path) == step:
            return path
    raise UserError(
        f"there is no checkpoint of step {step}",
        why=f"checkpoints are there for steps: {', '.join(str(step_of(path)) for path in found) or 'none'}",
        fix="give one of these steps",
    )


def step_of(path: Path) -> int | None:
    """Returns the step that a checkpoint's directory is named for; None if it is not named like one."""
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None


class DamagedFile(UserError):
    """Is raised for a checkpoint file that cannot be used."""

    file: Path


def damaged(file: Path, why: str) -> DamagedFile:
    """Returns the error for a checkpoint file that cannot be used."""
    if (file.parent / "config.json").is_file():
        error = DamagedFile(f"{file} is damaged", why=why, fix="fetch or write the model again")
    else:
        error = DamagedFile(
            f"checkpoint file {file} is damaged",
            why=why,
            fix="`shardwise resume RUN --from STEP` with an older step; `ls RUN/checkpoints` lists them",
        )
    error.file = file
    return error
