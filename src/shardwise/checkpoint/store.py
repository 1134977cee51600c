"""Writes and reads checkpoints: safetensors and JSON in a directory that appears in one rename, complete or not at all.

    checkpoints/step-200/  manifest.json  weights-1-of-2.safetensors  weights-2-of-2.safetensors  optimizer-...  rng-...

Every writer puts its files into a scratch directory that no other save has ever used, then a small record of them: the
sign that they are on the disk. Who commits waits for the records of all, makes the manifest of them, and renames. So a
writer that was left behind by an earlier save, or returns from the dead, can change nothing that is committed. With one
writer a file is called `weights.safetensors`. No pickle. Read next: manifest.py, part_file.py, reader.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch

from shardwise.checkpoint import listing
from shardwise.checkpoint.listing import MANIFEST, DamagedFile, damaged, step_of
from shardwise.checkpoint.manifest import (
    CHUNK,
    SCHEMA,
    CheckpointManifest,
    in_order,
    parse,
    read_manifest,
    sealed,
)
from shardwise.checkpoint.part_file import NAMED, THREADS, SliceSource, write_file
from shardwise.checkpoint.reader import SliceReader, open_part, opened
from shardwise.checkpoint.share_out import HeldSlice, SharedOut, share_out
from shardwise.errors import UserError
from shardwise.files import appearing_at_once, flush, take_name, write_atomically
from shardwise.foreign_json import read_object

Tensors = dict[str, torch.Tensor]
RECORD = "part-{}.json"
SEEN_S = 60.0  # seconds in which a network file system shows what another node has written


@dataclass(frozen=True)
class Checkpoint:
    """One committed checkpoint on disk."""

    path: Path
    step: int

    def manifest(self) -> CheckpointManifest:
        """Returns the content of manifest.json, or raises if it cannot be read."""
        return read_manifest(self.path)

    def verify(self, only: str | None = None, share: tuple[int, int] = (0, 1)) -> None:
        """Raises unless every file (or those of one group) is there, with the size and digests it was committed with.
        `share`: (index, count) of those who check it together; each takes its part of the digests."""
        manifest = self.manifest()
        files = manifest.files
        if only is not None:
            named = {one.file for tensor in manifest.tensors(only).values() for one in tensor.slices}
            files = {name: about for name, about in files.items() if name in named or name.startswith(f"{only}.")}
        handles = {name: open_part(self.path / name, about.bytes) for name, about in files.items()}
        try:
            chunks = [(name, number) for name, about in files.items() for number in range(len(about.digests))]
            mine = chunks[share[0] :: share[1]]

            def is_good(chunk: tuple[str, int]) -> bool:
                about, (name, number) = files[chunk[0]], chunk
                start = number * about.chunk
                found = _digest(handles[name], start, min(start + about.chunk, about.bytes))
                return found == about.digests[number]

            with ThreadPoolExecutor(THREADS) as threads:
                for (name, number), good in zip(mine, threads.map(is_good, mine), strict=True):
                    if not good:
                        threads.shutdown(wait=False, cancel_futures=True)
                        raise damaged(self.path / name, _where(manifest, name, number))
        finally:
            for handle in handles.values():
                os.close(handle)

    def load(self, group: str, *, verify: bool = False) -> Tensors:
        """Returns all tensors of a group (`weights`, `optimizer` or `rng`), by name; on request only if the digests are
        those it was committed with."""
        if verify:
            self.verify(only=group)
        with self.open() as reader:
            return {name: reader.read(group, name) for name in reader.tensors(group)}

    def open(self) -> AbstractContextManager[SliceReader]:
        """Opens the checkpoint, to read single tensors or slices of them."""
        return opened(self.path, self.manifest())


def _digest(handle: int, start: int, stop: int) -> str:
    found = hashlib.sha256()
    while start < stop:
        data = os.pread(handle, min(CHUNK, stop - start), start)
        if not data:
            return ""
        found.update(data)
        start += len(data)
    return found.hexdigest()


def _where(manifest: CheckpointManifest, name: str, number: int) -> str:
    """Returns in words where a digest is wrong: between which bytes, and which tensors are there."""
    about = manifest.files[name]
    start, stop = number * about.chunk, min((number + 1) * about.chunk, about.bytes)
    try:
        names = manifest.tensors_in(name, start, stop)
    except UserError:  # a header that cannot be read
        names = []
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    held = f", which hold {', '.join(names[:3])}{more}" if names else ""
    return f"its digest does not match the manifest between bytes {start} and {stop}{held}"


# Writing -------------------------------------------------------------------------------------------------------------


def begin(parent: Path, step: int) -> Path:
    """Returns a new scratch directory for the checkpoint of a step; what earlier saves have left there is removed."""
    sweep(parent)
    scratch = parent / f".step-{step}.partial-{uuid4().hex[:16]}"
    scratch.mkdir(parents=True)
    return scratch


def sweep(parent: Path) -> None:
    """Removes what processes that were killed in a save have left: the run is locked, so they are not alive. A
    checkpoint that was stepping aside for its successor comes back."""
    for leftover in parent.glob(".step-*"):
        if (match := re.fullmatch(r"\.(step-\d+)\.replaced-\w+", leftover.name)) and not (parent / match[1]).exists():
            leftover.rename(parent / match[1])
        else:
            shutil.rmtree(leftover, ignore_errors=True)


def write_part(scratch: Path, rank: int, shared: SharedOut, sources: Sequence[SliceSource]) -> None:
    """Writes the files of one rank, and last the record that says so. If it fails its files are removed: on a full disk
    they would be in the way."""
    files: dict[str, Any] = {}
    slices: list[list[Any]] = []
    try:
        for group in shared.groups():
            mine = [source for source in sources if source.slice.group == group]
            if not mine:
                continue
            writers = shared.writers(group)
            number = f"-{writers.index(rank) + 1}-of-{len(writers)}" if len(writers) > 1 else ""
            name = f"{group}{number}.safetensors"
            files[name] = None
            written = write_file(scratch / name, mine)
            files[name] = written.about
            slices += [[name, *one] for one in written.slices]
        record = scratch / RECORD.format(rank)
        write_atomically(record, json.dumps({"files": files, "slices": slices}))
    except BaseException:
        for name in files:
            (scratch / name).unlink(missing_ok=True)
        if len(shared.all_writers()) == 1:  # else others may still write there
            shutil.rmtree(scratch, ignore_errors=True)
        raise


def commit(
    scratch: Path,
    final: Path,
    step: int,
    state: dict[str, Any],
    writers: Sequence[int],
    groups: Sequence[str],
    go_on: Callable[[], bool] = lambda: True,
    seconds: float = SEEN_S,
) -> None:
    """Waits for the records of all writers, at most this long, and commits what they wrote under `final`."""
    deadline = time.monotonic() + seconds
    records = [scratch / RECORD.format(rank) for rank in writers]
    for rank, record in zip(writers, records, strict=True):
        while not record.is_file():
            if time.monotonic() > deadline or not go_on():
                raise OSError(5, f"rank {rank} has not written its part", str(record))
            time.sleep(0.02)
    write_manifest(scratch, step, state, records, groups)
    for record in records:
        record.unlink()
    flush(scratch)
    take_name(scratch, final, replace=True)
    flush(final.parent)


def write_manifest(
    scratch: Path, step: int, state: dict[str, Any], records: Sequence[Path], groups: Sequence[str]
) -> None:
    """Makes the manifest of what all writers say they wrote, and looks whether it is whole."""
    files: dict[str, Any] = {}
    found: list[list[Any]] = []
    for record in records:
        about = read_object(record)
        files |= about["files"]
        found += about["slices"]
    files = {name: files[name] for name in in_order(files)}
    numbers = {name: number for number, name in enumerate(files)}
    tensors: dict[str, dict[str, Any]] = {group: {} for group in groups}
    for file, group, name, dtype, whole, at, offsets, shape in sorted(found, key=lambda one: (one[2], one[6])):
        entry = tensors[group].setdefault(name, {"dtype": dtype, "shape": whole, "slices": []})
        entry["slices"].append([numbers[file], at, offsets, shape])
    content = {"schema": SCHEMA, "step": step, "state": state, "chunk": CHUNK, "files": files, "groups": tensors}
    parse(scratch, content)
    write_atomically(scratch / MANIFEST, sealed(content))


def write(final: Path, step: int, groups: dict[str, Tensors], state: dict[str, Any]) -> Checkpoint:
    """Writes groups of whole tensors as one writer, commits them under `final`, and returns the checkpoint."""
    sources = {
        HeldSlice(group, name, NAMED[value.dtype], (0,) * value.ndim, tuple(value.shape)): value
        for group, tensors in groups.items()
        for name, value in tensors.items()
    }
    shared = share_out([list(sources)], [True])
    with appearing_at_once(final, replace=True) as scratch:
        ordered = (task.slice for task in shared.tasks)
        write_part(scratch, 0, shared, [SliceSource(one, one.shape, sources[one].detach) for one in ordered])
        record = scratch / RECORD.format(0)
        write_manifest(scratch, step, state, [record], list(groups))
        record.unlink()
    return Checkpoint(final, step)


# Which there are -----------------------------------------------------------------------------------------------------


def committed(parent: Path) -> list[Checkpoint]:
    """Returns the committed checkpoints, newest first."""
    return [Checkpoint(path, step_of(path) or 0) for path in listing.committed(parent)]


def keep_newest(parent: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints. Each loses its name first, so that none is seen in part."""
    for old in committed(parent)[keep:]:
        nameless = parent / f".{old.path.name}.removed-{uuid4().hex[:8]}"
        os.replace(old.path, nameless)
        shutil.rmtree(nameless, ignore_errors=True)


def newest_good(
    parent: Path,
    *,
    verify: bool = True,
    at_step: int | None = None,
    steps: Sequence[int] | None = None,
    share: tuple[int, int] = (0, 1),
    agree: Callable[[str], str] = lambda problem: problem,
) -> tuple[Checkpoint | None, list[str]]:
    """Returns the newest checkpoint whose digests hold, and a line for each damaged one that was passed over.

    `steps` says which there are, newest first; by default the directory does. Ranks that read the same directory each
    check their `share` (index, count) of the digests; `agree` is a collective that returns what any of them has found
    wrong, or nothing."""
    skipped: list[str] = []
    if at_step is not None:
        candidates = [Checkpoint(listing.at_step(parent, at_step), at_step)]
    elif steps is not None:
        candidates = [Checkpoint(parent / f"step-{step}", step) for step in steps]
    else:
        candidates = committed(parent)
    for checkpoint in candidates:
        error = _problem(checkpoint, verify, share)
        why = agree(f"{error.why} ({error.file.name})" if error else "")
        if not why:
            return checkpoint, skipped
        if at_step is not None:
            raise error or damaged(checkpoint.path, why)
        skipped.append(f"passing over {checkpoint.path.name}: {why}")
    if skipped:
        raise UserError(
            "every checkpoint of this run is damaged",
            why="; ".join(skipped),
            fix="`shardwise resume RUN --from 0` starts it anew; the damaged ones are kept under another name",
        )
    return None, skipped


def _problem(checkpoint: Checkpoint, verify: bool, share: tuple[int, int]) -> DamagedFile | None:
    """Returns what is wrong with a checkpoint, if anything is."""
    try:
        if verify:
            checkpoint.verify(share=share)
        else:
            checkpoint.manifest()
        return None
    except DamagedFile as error:
        return error


def abandon_after(parent: Path, step: int) -> None:
    """Renames the checkpoints after a step, so that they are never resumed: a run that goes on from an older step
    leaves them behind."""
    for checkpoint in committed(parent):
        if checkpoint.step > step:
            target = parent / f"abandoned-{checkpoint.path.name}"
            shutil.rmtree(target, ignore_errors=True)
            os.replace(checkpoint.path, target)
