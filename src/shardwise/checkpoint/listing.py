"""Lists which checkpoints a run has, and reads their manifests. It imports no torch, so that listing costs nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.foreign_json import need, read_object

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


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the content of a checkpoint's manifest.json. Raises if it cannot be read, if it names files elsewhere, or
    if it is of another step than its directory says."""
    file = path / MANIFEST
    try:
        manifest = read_object(file)
        need(manifest, "state", dict)
        step = need(manifest, "step", int)
        for name, about in need(manifest, "files", dict).items():
            if Path(name).name != name or not isinstance(about, dict):
                raise ValueError(f"`files` has an entry that describes no file of this directory: {name[:80]!r}")
            need(about, "bytes", int)
            need(about, "sha256", str)
    except (OSError, ValueError) as error:
        raise damaged(file, str(error)) from None
    if step_of(path) not in (None, step):
        raise damaged(file, f"it is of step {step}, its directory is called {path.name}: one of them was changed")
    return manifest


def damaged(file: Path, why: str) -> UserError:
    """Returns the error for a checkpoint file that cannot be used."""
    if (file.parent / "config.json").is_file():
        return UserError(f"{file} is damaged", why=why, fix="fetch or write the model again")
    return UserError(
        f"checkpoint file {file} is damaged",
        why=why,
        fix="`shardwise resume RUN --from STEP` with an older step; `ls RUN/checkpoints` lists them",
    )
