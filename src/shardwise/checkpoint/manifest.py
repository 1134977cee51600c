"""Reads and writes a checkpoint's manifest: which file holds which slice of which tensor, and the digests of all bytes.

    {"schema": 2, "step": 200, "state": {...}, "chunk": 16777216,
     "files":  {"weights-1-of-2.safetensors": {"bytes": 1234, "digests": ["...", ...]}, ...},
     "groups": {"weights": {"embed.weight": {"dtype": "F32", "shape": [256, 64],
                                             "slices": [[0, 4096, [0, 0], [128, 64]], ...]}}},
     "sha256": "..."}

A slice is the number of its file (as listed), the byte where it begins there, its offsets and its shape. The last line
is the digest of everything before it. Schema 1, of earlier versions, has one file per group with whole tensors; its
slices are read from the files' own headers. No torch here. Invariant: what `read_manifest` returns names regular files
of its directory alone, and its slices tile every tensor exactly, without sharing a byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.checkpoint.listing import MANIFEST, damaged, step_of
from shardwise.errors import UserError
from shardwise.files import open_regular
from shardwise.foreign_json import need, parse_json, read_safetensors_header
from shardwise.terminal import shell_word

SCHEMA = 2
CHUNK = 16 * 2**20  # bytes that one digest is of
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
              "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip
FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\.safetensors")
SEAL = re.compile(rb',\n"sha256": "([0-9a-f]{64})"\n\}\n\Z')
BASE_BYTES, BYTES_PER_BYTE = 4 * 2**20, 64  # a manifest may be this long, and 1/64 of its files' bytes longer
BASE_VALUES = 200_000  # lists and objects in it, likewise
DIMS = 16

Shape = tuple[int, ...]


class UnusableHere(UserError):
    """Is raised for a checkpoint that may be whole, but not for us to read: of a later version, or of another user. It
    is not passed over, for going on from an older one would lose what was trained."""


def not_ours_to_read(file: Path) -> UnusableHere:
    """Returns the error for a file that the system does not let us read."""
    return UnusableHere(
        f"{file} cannot be read",
        why="the system does not permit it: it belongs to another user, or its permissions were changed",
        fix=f"ls -l {shell_word(file)}; then chown or chmod, or resume as the user who trained",
    )


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint: its size, and the SHA-256 of each `chunk` bytes of it."""

    bytes: int
    chunk: int
    digests: tuple[str, ...]


@dataclass(frozen=True)
class StoredSlice:
    """A box of a tensor, whose elements lie in one piece from byte `at` of a file."""

    file: str
    at: int
    offsets: Shape
    shape: Shape


@dataclass(frozen=True)
class StoredTensor:
    """One tensor as all ranks together hold it; `dtype` is named as in safetensors."""

    dtype: str
    shape: Shape
    slices: tuple[StoredSlice, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


Group = dict[str, StoredTensor]


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint says of itself."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, StoredFile]
    groups: dict[str, Group] = field(default_factory=dict)

    def tensors(self, group: str) -> Group:
        """Returns the tensors of a group (`weights`, `optimizer`, `rng`) by name."""
        if group in self.groups:
            return self.groups[group]
        file = f"{group}.safetensors"
        if file not in self.files:
            raise damaged(self.path / MANIFEST, f"it does not list {file}")
        self.groups[group] = _tensors_of_file(self.path / file, self.files[file].bytes)  # schema 1
        return self.groups[group]

    def tensors_in(self, file: str, start: int, stop: int) -> list[str]:
        """Returns the names of the tensors of which elements lie between two bytes of a file."""
        found = []
        for group in self.groups.values():
            for name, tensor in group.items():
                size = ITEM_BYTES[tensor.dtype]
                places = ((one.at, one.at + math.prod(one.shape) * size) for one in tensor.slices if one.file == file)
                found += [name for begin, end in places if begin < stop and end > start][:1]
        return found


def read_manifest(path: Path) -> CheckpointManifest:
    """Returns the manifest of a checkpoint's directory. Raises if it cannot be read, is not as it was committed, names
    files elsewhere, has slices that do not fit, or is of another step than its directory says."""
    file = path / MANIFEST
    try:
        content, found = _read(file)
        schema = need(found, "schema", int) if "schema" in found else 1
        if schema > SCHEMA:
            raise UnusableHere(
                f"{path} is of a later version of Shardwise",
                why=f"its format is number {schema}, this version reads up to {SCHEMA}",
                fix="use that version, or give an older step: --from STEP",
            )
        state, step = need(found, "state", dict), need(found, "step", int)
        if schema == SCHEMA:
            check_seal(content)
            manifest = parse(path, found)
        else:
            files = {name: _whole_file(name, about) for name, about in need(found, "files", dict).items()}
            manifest = CheckpointManifest(path, step, state, files)
    except PermissionError:
        raise not_ours_to_read(file) from None
    except (OSError, ValueError) as error:
        raise damaged(file, str(error)) from None
    if step_of(path) not in (None, step):
        raise damaged(file, f"it is of step {step}, its directory is called {path.name}: one of them was changed")
    return manifest


def parse(path: Path, found: Mapping[str, Any]) -> CheckpointManifest:
    """Returns what a manifest of schema 2 says; raises ValueError where it is not consistent."""
    content = dict(found)
    chunk = need(content, "chunk", int)
    files = {name: _chunked_file(name, about, chunk) for name, about in need(content, "files", dict).items()}
    names = list(files)
    groups = {
        str(group): {name: _tensor(name, about, names) for name, about in _object(group, tensors).items()}
        for group, tensors in need(content, "groups", dict).items()
    }
    _check_bytes(groups, files)
    return CheckpointManifest(path, need(content, "step", int), need(content, "state", dict), files, groups)


def sealed(content: Mapping[str, Any]) -> str:
    """Returns the text of a manifest, a line per tensor and file, that ends with its own digest."""
    lines = []
    for key, value in content.items():
        if key == "sha256":
            continue
        if key == "groups":
            groups = (f"{json.dumps(group)}: {_lines(tensors)}" for group, tensors in value.items())
            lines.append('"groups": {\n' + ",\n".join(groups) + "}")
        else:
            lines.append(f"{json.dumps(key)}: {_lines(value) if key == 'files' else json.dumps(value)}")
    body = "{" + ",\n".join(lines)
    return f'{body},\n"sha256": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def check_seal(content: bytes) -> None:
    """Raises ValueError unless a manifest is, byte for byte, as it was written."""
    seal = SEAL.search(content, max(0, len(content) - 100))
    if seal is None or hashlib.sha256(content[: seal.start()]).hexdigest().encode() != seal[1]:
        raise ValueError("its own digest does not match: it was changed after it was written")


def _lines(values: Mapping[str, Any]) -> str:
    return "{" + ",\n".join(f"{json.dumps(name)}: {json.dumps(about)}" for name, about in values.items()) + "}"


def _read(file: Path) -> tuple[bytes, dict[str, Any]]:
    """Returns a manifest's bytes and the object in it. How long it may be follows from the files beside it: what a
    parser needs stays small beside what the checkpoint says."""
    with os.scandir(file.parent) as entries:
        held = sum(entry.stat(follow_symlinks=False).st_size for entry in entries if entry.name != MANIFEST)
    limit = BASE_BYTES + held // BYTES_PER_BYTE
    with open_regular(file) as stream:
        content = stream.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"it has more than {limit >> 10} KiB, too many beside files of {held} bytes")
    if content.count(b"[") + content.count(b"{") > BASE_VALUES + held // (8 * BYTES_PER_BYTE):
        raise ValueError(f"it has too many lists and objects beside files of {held} bytes")
    found = parse_json(content, limit)
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")
    return content, found


def _whole_file(name: str, about: Any) -> StoredFile:
    about = _object(_file_name(name), about)
    size = _size(name, need(about, "bytes", int))
    return StoredFile(size, max(size, 1), (need(about, "sha256", str),))


def _chunked_file(name: str, about: Any, chunk: int) -> StoredFile:
    about = _object(_file_name(name), about)
    size, digests = _size(name, need(about, "bytes", int)), need(about, "digests", list)
    if not 2**12 <= chunk <= 2**30 or len(digests) != -(-size // chunk) or not all(isinstance(d, str) for d in digests):
        raise ValueError(f"{name} has {len(digests)} digests, each of {chunk} bytes, for {size} bytes")
    return StoredFile(size, chunk, tuple(digests))


def _file_name(name: str) -> str:
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"`files` has an entry that describes no file of this directory: {name[:80]!r}")
    return name


def _object(name: str, about: Any) -> dict[str, Any]:
    if not isinstance(about, dict):
        raise ValueError(f"{name[:80]!r} is not described by an object")
    return about


def _size(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name[:80]} has {str(value)[:40]} where a size is needed")
    return value


def _sizes(name: str, values: Any) -> Shape:
    if not isinstance(values, list) or len(values) > DIMS:
        raise ValueError(f"{name[:80]} has {str(values)[:40]} where a list of at most {DIMS} sizes is needed")
    return tuple(_size(name, value) for value in values)


def _dtype(name: str, dtype: Any) -> str:
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{name[:80]} has the number format {str(dtype)[:40]}, which is none of ours")
    return dtype


def _tensor(name: str, about: Any, files: Sequence[str]) -> StoredTensor:
    about = _object(name, about)
    dtype, shape = _dtype(name, about.get("dtype")), _sizes(name, about.get("shape"))
    slices = []
    for found in need(about, "slices", list):
        if not isinstance(found, list) or len(found) != 4:
            raise ValueError(f"{name[:80]} has {str(found)[:40]} where a slice is needed")
        number, at = _size(name, found[0]), _size(name, found[1])
        if number >= len(files):
            raise ValueError(f"{name[:80]} lies in file number {number} of {len(files)}")
        slices.append(StoredSlice(files[number], at, _sizes(name, found[2]), _sizes(name, found[3])))
    check_tiles(name, shape, [(one.offsets, one.shape) for one in slices])
    return StoredTensor(dtype, shape, tuple(slices))


def check_tiles(name: str, shape: Shape, boxes: Sequence[tuple[Shape, Shape]]) -> None:
    """Raises ValueError unless boxes (offsets, shape) fill a tensor without lying on each other. They are a grid: what
    layouts cut, they cut along whole dimensions."""
    if not boxes:
        if math.prod(shape):
            raise ValueError(f"no slice of {name[:80]} is there")
        return
    ranges: list[set[tuple[int, int]]] = [set() for _ in shape]
    for offsets, extents in boxes:
        if not len(offsets) == len(extents) == len(shape):
            raise ValueError(f"{name[:80]} has {len(shape)} dimensions, a slice of it {len(offsets)}")
        for cuts, start, extent in zip(ranges, offsets, extents, strict=True):
            cuts.add((start, start + extent))
    for dim, (size, cuts) in enumerate(zip(shape, ranges, strict=True)):
        end = 0
        for start, stop in sorted(cuts):
            if start != end or stop <= start:
                how = "leave out" if start > end else "hold twice" if start < end else "hold nothing of"
                raise ValueError(f"the slices of {name[:80]} {how} {min(start, end)} along dimension {dim}")
            end = stop
        if end != size:
            raise ValueError(f"the slices of {name[:80]} end at {end} of {size} along dimension {dim}")
    needed = math.prod(len(cuts) for cuts in ranges)
    if not len(set(boxes)) == len(boxes) == needed:
        raise ValueError(f"{name[:80]} has {len(boxes)} slices where {needed} different ones are needed")


def _check_bytes(groups: Mapping[str, Group], files: Mapping[str, StoredFile]) -> None:
    """Raises ValueError where a slice ends after its file, or begins in another one's bytes."""
    used: dict[str, list[tuple[int, int, str]]] = {name: [] for name in files}
    for group in groups.values():
        for name, tensor in group.items():
            for one in tensor.slices:
                end = one.at + math.prod(one.shape) * ITEM_BYTES[tensor.dtype]
                used[one.file].append((one.at, end, name))
    for file, places in used.items():
        end, before = 0, ""
        for start, stop, name in sorted(places):
            if start < end:
                raise ValueError(f"{before[:80]} and {name[:80]} lie on each other in {file}")
            end, before = stop, name
        if end > files[file].bytes:
            raise ValueError(f"{before[:80]} ends at byte {end} of {file}, which has {files[file].bytes}")


def _tensors_of_file(file: Path, size: int) -> Group:
    """Returns the tensors of a safetensors file, each in one slice, as its header says."""
    try:
        header, begin = read_safetensors_header(file)
        found = {}
        for name, about in header.items():
            if name == "__metadata__":
                continue
            dtype, shape = _dtype(name, about.get("dtype")), _sizes(name, about.get("shape"))
            start, stop = _sizes(name, about.get("data_offsets"))
            if stop - start != math.prod(shape) * ITEM_BYTES[dtype] or begin + stop > size:
                raise ValueError(f"{name[:80]} does not fit between bytes {start} and {stop}")
            slices = (StoredSlice(file.name, begin + start, (0,) * len(shape), shape),)
            found[name] = StoredTensor(dtype, shape, slices)
        _check_bytes({"": found}, {file.name: StoredFile(size, 1, ())})
        return found
    except (OSError, ValueError) as error:
        raise damaged(file, str(error)) from None


def in_order(names: Iterable[str]) -> list[str]:
    """Returns file names as a manifest lists them: by group, then by number."""
    return sorted(names, key=lambda name: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)])
