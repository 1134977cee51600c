"""A flipped bit is found before anything is used, and a save that dies anywhere leaves a checkpoint to go on from."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small

from shardwise.checkpoint import store
from shardwise.checkpoint.manifest import MANIFEST, read_manifest
from shardwise.errors import UserError

FLIPS = 1000


def test_each_of_a_thousand_flipped_bits_is_found_and_the_checkpoint_before_is_used(tmp_path: Path) -> None:
    small.save(tmp_path, 1, {"seed": 1})
    small.save(tmp_path, 2, {"seed": 1})
    folder, draw = tmp_path / "step-2", random.Random(0)
    manifest = read_manifest(folder)
    files = sorted(folder.iterdir())
    assert len(files) == 7
    num_named = 0
    for number in range(FLIPS):
        file = files[number % len(files)]
        content = file.read_bytes()
        at = draw.randrange(len(content))
        file.write_bytes(content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :])
        checkpoint, skipped = store.newest_good(tmp_path)
        assert checkpoint is not None and checkpoint.step == 1, f"byte {at} of {file.name} is not missed"
        assert len(skipped) == 1 and skipped[0].startswith("passing over step-2: ")
        assert skipped[0].endswith(f"({file.name})"), skipped
        if named := manifest.tensors_in(file.name, at, at + 1):
            shown = skipped[0].split("which hold ")[1].rsplit(" (", 1)[0]
            num_named += named[0] in shown
            assert named[0] in shown or "more" in shown, skipped
        file.write_bytes(content)
    assert num_named > FLIPS / 4, "chunks hold few tensors here, so most are named"
    checkpoint, skipped = store.newest_good(tmp_path)
    assert checkpoint is not None and checkpoint.step == 2 and not skipped and small.is_whole(checkpoint)


def test_a_checkpoint_of_a_later_version_is_refused_rather_than_passed_over(tmp_path: Path) -> None:
    """It is whole: going on from the one before would lose what was trained, and write over it."""
    small.save(tmp_path, 1, {})
    small.save(tmp_path, 2, {})
    file = tmp_path / "step-2" / MANIFEST
    file.write_text(file.read_text().replace('"schema": 2', '"schema": 3', 1))
    with pytest.raises(UserError, match="later version") as error:
        store.newest_good(tmp_path)
    assert "number 3" in error.value.why


# Crash points --------------------------------------------------------------------------------------------------------

ROWS = 600  # of one matrix, so that there are enough writes
CUT = 77  # the exit code of a process that dies in a save


def die_at(point: int, parent: Path, loses_power: bool) -> int:
    """Saves step 2 in a child that dies at its `point`-th write, flush, or change of a directory; returns the child's
    exit code. Without power what was not flushed onto the disk is gone too."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = 1
    try:
        code = _dying(point, parent, loses_power)
    finally:
        os._exit(code)


def _dying(point: int, parent: Path, loses_power: bool) -> int:
    seen, flushed = 0, set[int]()
    before = {file.stat().st_ino for file in parent.rglob("*")}

    def tick() -> None:
        nonlocal seen
        seen += 1
        if seen != point:
            return
        if loses_power:
            for file in parent.rglob("*"):
                if file.is_file() and file.stat().st_ino not in flushed | before:
                    os.truncate(file, 0)
        os._exit(CUT)

    def counted(real: Callable[..., Any], *, halves: bool = False) -> Callable[..., Any]:
        def call(*args: Any, **words: Any) -> Any:
            if halves and seen == point - 2:
                real(args[0], args[1][: len(args[1]) // 2], *args[2:])  # a part of it arrives
            tick()
            found = real(*args, **words)
            if real is fsync:
                flushed.add(os.fstat(args[0]).st_ino)
            tick()
            return found

        return call

    fsync = os.fsync
    os.pwrite = counted(os.pwrite, halves=True)
    os.fsync = counted(os.fsync)
    os.ftruncate = counted(os.ftruncate)
    changes = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}
    sys.addaudithook(lambda event, _: tick() if event in changes else None)
    small.save(parent, 2, {"seed": 1}, keep=1, rows=ROWS)
    return 0


def crash_everywhere() -> tuple[int, list[str]]:
    """How many points there are, and what was wrong after dying at any of them."""
    home = tempfile.mkdtemp(dir=next((path for path in ("/dev/shm",) if os.path.isdir(path)), None))  # quick to flush
    parent, template = Path(home) / "run", Path(home) / "template"
    small.save(template, 1, {"seed": 1}, rows=ROWS)
    point, wrong, ended, steps = 0, [], 0, []
    while ended < 1:
        point += 1
        shutil.copytree(template, parent)
        code = die_at(point, parent, loses_power=point % 2 == 0)
        ended += code == 0
        if code not in (0, CUT):
            wrong.append(f"point {point}: exit code {code}")
        store.sweep(parent)
        checkpoint, skipped = store.newest_good(parent)
        if checkpoint is None or skipped or not small.is_whole(checkpoint):
            wrong.append(f"point {point}: {checkpoint}, {skipped}")
        elif code == 0 and checkpoint.step != 2:
            wrong.append("the save that was not cut short is not there")
        steps.append(checkpoint.step if checkpoint else 0)
        if left := [file.name for file in parent.iterdir() if file.name.startswith(".")]:
            wrong.append(f"point {point}: {left} is left")
        shutil.rmtree(parent)
    shutil.rmtree(home)
    if steps != sorted(steps):
        wrong.append("after a later point an older checkpoint is the newest")
    return point - 1, wrong


def test_a_save_that_dies_at_any_write_flush_or_rename_leaves_the_newest_complete_one(ranks: Any) -> None:
    [(num_points, wrong)] = ranks.run(crash_everywhere, 1, fresh=True, timeout=200)
    assert not wrong, "\n".join(wrong[:5])
    assert num_points >= 200


def read_as_another_user(folder: str) -> str:
    """What is said to a user who may not read a data file; root may read anything, so a child becomes another one."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setuid(65534)
            store.newest_good(Path(folder))
        except UserError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with open(reader, "rb") as said:
        return said.read().decode()


def test_a_checkpoint_of_another_user_is_refused_rather_than_passed_over(ranks: Any) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory() as home:
        os.chmod(home, 0o755)
        for step in (1, 2):
            small.save(Path(home), step, {})
        for file in (Path(home) / "step-2").glob("weights*"):
            os.chmod(file, 0o600)
        [said] = ranks.run(read_as_another_user, 1, home, fresh=True)
    assert "cannot be read" in said and "does not permit it" in said and "step-2" in said
