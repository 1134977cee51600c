"""Writes and reads checkpoints: safetensors and JSON in a directory that appears in one rename, complete or not at all.

    checkpoints/step-200/  manifest.json  weights.safetensors  optimizer.safetensors  rng.safetensors

The manifest holds the step, free-form state, and a SHA-256 digest and size for every file. Loading checks them. No
pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from shardwise.checkpoint import listing
from shardwise.checkpoint.listing import MANIFEST, damaged, read_manifest, step_of
from shardwise.errors import UserError
from shardwise.files import appearing_at_once, write_tensors

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """One committed checkpoint on disk."""

    path: Path
    step: int

    def manifest(self) -> dict[str, Any]:
        """Returns the content of manifest.json, or raises if it cannot be read."""
        return read_manifest(self.path)

    def verify(self, only: str | None = None) -> None:
        """Raises unless every file (or that of one group) is there, with the size and digest it was committed with."""
        files = self.manifest()["files"]
        if only is not None:
            files = {f"{only}.safetensors": files.get(f"{only}.safetensors")}
        for name, about in files.items():
            file = self.path / name
            if about is None:
                raise damaged(self.path / MANIFEST, f"it does not list {name}")
            if not file.is_file():
                raise damaged(file, "the file is missing")
            if file.stat().st_size != about["bytes"]:
                raise damaged(file, f"it has {file.stat().st_size} bytes of {about['bytes']}")
            if digest(file) != about["sha256"]:
                raise damaged(file, "its digest does not match the manifest")

    def load(self, group: str, *, verify: bool = False) -> Tensors:
        """Returns all tensors of a group (`weights`, `optimizer` or `rng`), by name; on request only if the file's
        digest is the one it was committed with."""
        if verify:
            self.verify(only=group)
        try:
            return load_file(self.path / f"{group}.safetensors")
        except (OSError, SafetensorError) as error:
            raise damaged(self.path / f"{group}.safetensors", str(error)) from None

    @contextmanager
    def open(self, group: str) -> Iterator[Any]:
        """Opens a group's file, to take single tensors from (`keys()`, `get_tensor(name)`) without reading the rest."""
        file = self.path / f"{group}.safetensors"
        try:
            with safe_open(file, framework="pt") as tensors:
                yield tensors
        except (OSError, SafetensorError) as error:
            raise damaged(file, str(error)) from None


def save(parent: Path, step: int, groups: dict[str, Tensors], state: dict[str, Any], keep: int) -> Checkpoint:
    """Commits the checkpoint of a step and returns it; then drops all but the newest `keep`."""
    # Left by a process that was killed while it wrote: this run is locked, so it is not alive.
    for leftover in parent.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    checkpoint = write(parent / f"step-{step}", step, groups, state)
    for old in committed(parent)[keep:]:
        shutil.rmtree(old.path, ignore_errors=True)
    return checkpoint


def write(final: Path, step: int, groups: dict[str, Tensors], state: dict[str, Any]) -> Checkpoint:
    """Writes all groups, commits them under `final` with one rename, and returns the checkpoint."""
    files = {}
    with appearing_at_once(final, replace=True) as scratch:  # replace: the same step again, after a resume
        for group, tensors in groups.items():
            file = scratch / f"{group}.safetensors"
            write_tensors(file, {name: tensor.detach().contiguous() for name, tensor in tensors.items()})
            files[file.name] = {"bytes": file.stat().st_size, "sha256": digest(file)}
        manifest = {"schema": 1, "step": step, "files": files, "state": state}
        (scratch / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    return Checkpoint(final, step)


def committed(parent: Path) -> list[Checkpoint]:
    """Returns the committed checkpoints, newest first."""
    return [Checkpoint(path, step_of(path) or 0) for path in listing.committed(parent)]


def newest_good(
    parent: Path, *, verify: bool = True, at_step: int | None = None
) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest checkpoint whose digests hold, and a line for each damaged one that was passed over."""
    skipped: list[str] = []
    candidates = committed(parent) if at_step is None else [Checkpoint(listing.at_step(parent, at_step), at_step)]
    for checkpoint in candidates:
        try:
            if verify:
                checkpoint.verify()
            else:
                checkpoint.manifest()
            return checkpoint, skipped
        except UserError as error:
            if at_step is not None:
                raise
            skipped.append(f"passing over {checkpoint.path.name}: {error.why}")
    if skipped:
        raise UserError(
            "every checkpoint of this run is damaged",
            why="; ".join(skipped),
            fix="`shardwise resume RUN --from 0` starts it anew; the damaged ones are kept under another name",
        )
    return None, skipped


def abandon_after(parent: Path, step: int) -> None:
    """Renames the checkpoints after a step, so that they are never resumed: a run that goes on from an older step
    leaves them behind."""
    for checkpoint in committed(parent):
        if checkpoint.step > step:
            target = parent / f"abandoned-{checkpoint.path.name}"
            shutil.rmtree(target, ignore_errors=True)
            os.replace(checkpoint.path, target)


def digest(file: Path) -> str:
    """Returns the SHA-256 of a file, as hexadecimal digits."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
