"""Which checkpoints a run has. No torch, so that listing costs nothing."""

from __future__ import annotations

import re
from pathlib import Path

MANIFEST = "manifest.json"


def committed(parent: Path) -> list[Path]:
    """Directories of committed checkpoints, newest first."""
    found = {path: step_of(path) for path in parent.glob("step-*") if (path / MANIFEST).is_file()}
    return sorted((path for path, step in found.items() if step is not None), key=lambda path: -(found[path] or 0))


def step_of(path: Path) -> int | None:
    match = re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match else None
