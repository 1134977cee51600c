"""Checkpoints made to do harm are refused: at once, with little memory, with nothing executed or written elsewhere.

Whoever makes one knows the format, so every manifest here carries a right digest of itself.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small

from shardwise.checkpoint import store
from shardwise.checkpoint.manifest import MANIFEST, sealed
from shardwise.errors import UserError

Content = dict[str, Any]


class Bomb:
    """Executes when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("executed",)


def first(content: Content) -> Content:
    """The entry of one tensor, of two slices."""
    return content["groups"]["weights"]["embed.weight"]


def told(change: Callable[[Content], object]) -> Callable[[Path], None]:
    """A manifest that was changed by somebody who knows the format."""

    def apply(folder: Path) -> None:
        content = json.loads((folder / MANIFEST).read_text())
        change(content)
        (folder / MANIFEST).write_text(sealed(content))

    return apply


def text(content: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / MANIFEST).write_bytes(content.encode() if isinstance(content, str) else content)


def at(number: int, value: Any) -> Callable[[Path], None]:
    """Another value in the first slice: file, begin, offsets, shape."""
    return told(lambda content: first(content)["slices"][0].__setitem__(number, value))


def shape(value: Any) -> Callable[[Path], None]:
    return told(lambda content: first(content).__setitem__("shape", value))


def file_called(name: str) -> Callable[[Path], None]:
    def change(content: Content) -> None:
        content["files"] = {name if number == 0 else key: about
                            for number, (key, about) in enumerate(content["files"].items())}  # fmt: skip

    return told(change)


def about_file(key: str, value: Any) -> Callable[[Path], None]:
    return told(lambda content: next(iter(content["files"].values())).__setitem__(key, value))


def data_file(folder: Path) -> Path:
    return folder / "weights-1-of-2.safetensors"


def in_place_of_file(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data_file(folder).rename(folder.parent / "elsewhere")
        make(data_file(folder))

    return apply


def schema_1(content: bytes) -> Callable[[Path], None]:
    """The earlier format, with a file whose size and digest are right."""

    def apply(folder: Path) -> None:
        import hashlib

        (folder / "weights.safetensors").write_bytes(content)
        about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        state = json.loads((folder / MANIFEST).read_text())["state"]
        manifest = {"schema": 1, "step": 2, "files": {"weights.safetensors": about}, "state": state}
        (folder / MANIFEST).write_text(json.dumps(manifest))

    return apply


def with_header(header: str, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header.encode() + b"\0" * 64


def one_tensor(**changes: Any) -> str:
    return json.dumps({"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes})


HOSTILE: dict[str, Callable[[Path], None]] = {
    "no JSON": text("hello"),
    "nothing": text(""),
    "a list": text("[1, 2]"),
    "a hundred thousand lists in each other": text("[" * 100_000 + "]" * 100_000),
    "objects in each other": text('{"a":' * 50_000 + "1" + "}" * 50_000),
    "an integer of a million digits": text('{"schema": 2, "step": ' + "9" * 1_000_000 + "}"),
    "no UTF-8": text(b'{"schema": 2, "step": "\xff\xfe"}'),
    "300 MB": lambda folder: os.truncate(folder / MANIFEST, 300_000_000),
    "a million empty lists": text('{"schema": 2, "state": {}, "step": [' + "[]," * 1_000_000 + "0]}"),
    "a million numbers": text('{"schema": 2, "state": {}, "step": [' + "1," * 1_900_000 + "0]}"),
    "a pickle": text(pickle.dumps(Bomb())),
    "no seal": lambda folder: (folder / MANIFEST).write_text(
        json.dumps(json.loads((folder / MANIFEST).read_text()) | {"sha256": ""})
    ),
    "a later format": told(lambda content: content.__setitem__("schema", 3)),
    "a format in words": told(lambda content: content.__setitem__("schema", "2")),
    "a step in words": told(lambda content: content.__setitem__("step", "2")),
    "state that is a list": told(lambda content: content.__setitem__("state", [])),
    "a tensor that is a list": told(lambda content: content.update(groups={"weights": {"x": []}})),
    "chunks of nothing": told(lambda content: content.__setitem__("chunk", 0)),
    "chunks of an exabyte": told(lambda content: content.__setitem__("chunk", 2**60)),
    "a NaN in the shape": shape([float("nan"), 40]),
    "an infinite shape": shape([float("inf"), 40]),
    "a negative shape": shape([-600, 40]),
    "both negative": shape([-600, -40]),
    "a shape of fractions": shape([600.0, 40]),
    "a shape of truths": shape([True, 40]),
    "a shape in words": shape("600, 40"),
    "a thousand dimensions": shape([1] * 1000),
    "2**62 rows": shape([2**62, 40]),
    "more rows than there are": shape([601, 40]),
    "fewer rows than there are": shape([599, 40]),
    "another number format": told(lambda content: first(content).__setitem__("dtype", "O")),
    "a list as number format": told(lambda content: first(content).__setitem__("dtype", ["F32"])),
    "a wider number format": told(lambda content: first(content).__setitem__("dtype", "F64")),
    "a slice that is missing": told(lambda content: first(content)["slices"].pop()),
    "a slice that is there twice": told(lambda content: first(content)["slices"].append(first(content)["slices"][0])),
    "no slices": told(lambda content: first(content).__setitem__("slices", [])),
    "slices in an object": told(lambda content: first(content).__setitem__("slices", {"0": []})),
    "slices of words": told(lambda content: first(content).__setitem__("slices", ["abcd"])),
    "a file that is not listed": at(0, 99),
    "a file before the first": at(0, -1),
    "a file by its name": at(0, "/etc/passwd"),
    "bytes before the file": at(1, -4096),
    "bytes after the file": at(1, 2**40),
    "bytes of another tensor": at(1, 4096 + 160),
    "a slice that lies on its neighbour": at(2, [100, 0]),
    "a negative offset": at(2, [-1, 0]),
    "a NaN as offset": at(2, [float("nan"), 0]),
    "a slice of nothing": at(3, [0, 40]),
    "a slice of three dimensions": at(3, [300, 40, 1]),
    "a file above": file_called("../elsewhere.safetensors"),
    "a file of the system": file_called("/etc/passwd"),
    "a file below": file_called("a/b.safetensors"),
    "a hidden file": file_called(".x.safetensors"),
    "a pickle as file": file_called("weights.pt"),
    "a name with a zero": file_called("a\0.safetensors"),
    "a name of ten thousand letters": file_called("a" * 10_000 + ".safetensors"),
    "fewer digests than chunks": about_file("digests", []),
    "digests that are numbers": about_file("digests", [1, 2, 3]),
    "a negative size": about_file("bytes", -1),
    "an exabyte": about_file("bytes", 2**60),
    "a link out of the directory": in_place_of_file(lambda file: file.symlink_to(file.parent.parent / "elsewhere")),
    "a link to a device": in_place_of_file(lambda file: file.symlink_to("/dev/zero")),
    "a pipe": in_place_of_file(os.mkfifo),
    "a directory": in_place_of_file(lambda file: file.mkdir()),
    "a file that is not there": in_place_of_file(lambda file: None),
    "a pickle in the place of a file": in_place_of_file(lambda file: file.write_bytes(pickle.dumps(Bomb()))),
    "a file that was cut": lambda folder: os.truncate(data_file(folder), 5000),
    "a file that has grown": lambda folder: os.truncate(data_file(folder), 5_000_000),
    "a manifest that is a pipe": lambda folder: ((folder / MANIFEST).unlink(), os.mkfifo(folder / MANIFEST))[1],
    "earlier format: a pickle": schema_1(pickle.dumps(Bomb())),
    "earlier format: a header of exabytes": schema_1(with_header("{}", 2**63 - 1)),
    "earlier format: a header in each other": schema_1(with_header("[" * 100_000)),
    "earlier format: outside of the file": schema_1(with_header(one_tensor(data_offsets=[4096, 4112]))),
    "earlier format: a size that is none": schema_1(with_header(one_tensor(data_offsets=[0, 8]))),
    "earlier format: backwards": schema_1(with_header(one_tensor(data_offsets=[16, 0]))),
    "earlier format: negative": schema_1(with_header(one_tensor(shape=[-4], data_offsets=[0, -16]))),
    "earlier format: one place": schema_1(with_header(one_tensor(data_offsets=[0]))),
    "earlier format: on each other": schema_1(
        with_header(json.dumps({name: json.loads(one_tensor())["x"] for name in "xy"}))
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    small.save(folder, 2, {"seed": 1}, rows=600)
    return folder / "step-2"


def peak_bytes() -> int:
    return 1024 * next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_checkpoint_is_refused(
    name: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    folder = home / "checkpoints" / "step-2"
    shutil.copytree(saved, folder)
    HOSTILE[name](folder)
    monkeypatch.chdir(home)
    before = sorted(tmp_path.rglob("*"))
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory begins here
    memory, began = peak_bytes(), time.process_time()
    checkpoint = store.Checkpoint(folder, 2)
    with pytest.raises(UserError) as error:
        checkpoint.verify()
        checkpoint.load("weights")
    assert time.process_time() - began < 1
    assert peak_bytes() - memory < 100_000_000
    assert error.value.why and error.value.fix and len(str(error.value)) < 2000
    assert sorted(tmp_path.rglob("*")) == before, "nothing was written, and nothing executed"
