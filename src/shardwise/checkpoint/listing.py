"""Which checkpoints a run has. No torch, so that listing costs nothing."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.errors import UserError

MANIFEST = "manifest.json"


def committed(parent: Path) -> list[Path]:
    """Directories of committed checkpoints, newest first."""
    found = {path: step_of(path) for path in parent.glob("step-*") if (path / MANIFEST).is_file()}
    return sorted((path for path, step in found.items() if step is not None), key=lambda path: -(found[path] or 0))


def at_step(parent: Path, step: int) -> Path:
    """The committed checkpoint of a certain step, which must be there."""
    found = committed(parent)
    for path in found:
        if step_of(path) == step:
            return path
    raise UserError(
        f"there is no checkpoint of step {step}",
        why=f"checkpoints are there for steps: {', '.join(str(step_of(path)) for path in found) or 'none'}",
        fix="choose one",
    )


def step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None
