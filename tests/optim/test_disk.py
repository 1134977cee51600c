"""The scratch file: what is written is read, nothing is left behind, and every bad directory is refused in three
lines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.errors import UserError
from shardwise.optim.offload import disk
from shardwise.optim.offload.disk import BLOCK_BYTES, ScratchFile, aligned, check_directory, filesystem, new_buffer


def test_many_blocks_come_back_as_they_were_written(tmp_path):
    size = 2 * BLOCK_BYTES + 4096
    file = ScratchFile(tmp_path, 3 * size)
    out, back = new_buffer(size), new_buffer(size)
    out[:] = os.urandom(size)
    file.write(size, memoryview(out)).wait()
    file.read(size, memoryview(back)).wait()
    assert back[:] == out[:]
    file.read(0, memoryview(back)).wait()
    assert back[:] == bytes(size), "what was never written reads as zeros"
    file.close()


def test_the_file_has_no_name_so_a_killed_run_leaves_nothing(tmp_path):
    file = ScratchFile(tmp_path, 4096)
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_without_direct_transfers_the_same_numbers_come_back(tmp_path, monkeypatch):
    """A filesystem without O_DIRECT refuses the flag; this one here is told to be such a one."""
    monkeypatch.setattr(disk.os, "O_DIRECT", 0)
    file = ScratchFile(tmp_path, 4096)
    file.is_direct = False
    buffer = new_buffer(4096)
    buffer[:5] = b"hello"
    file.write(0, memoryview(buffer)).wait()
    buffer[:5] = b"-----"
    file.read(0, memoryview(buffer)).wait()
    assert buffer[:5] == b"hello"
    file.close()


def test_lengths_are_whole_pages():
    assert [aligned(n) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]


def refusal(directory: Path, needed: int = 0, *, memory_is_fine: bool = False) -> list[str]:
    with pytest.raises(UserError) as caught:
        check_directory(directory, needed, memory_is_fine=memory_is_fine)
    return str(caught.value).splitlines()


def test_a_missing_directory_is_refused(tmp_path):
    what, why, fix = refusal(tmp_path / "nowhere")
    assert what == f"error: the offload directory {tmp_path}/nowhere is not there"
    assert "must exist" in why
    assert fix == f"  fix  mkdir -p {tmp_path}/nowhere, or memory.offload_dir=DIR"


def test_a_directory_that_cannot_be_written_is_refused():
    what, why, fix = refusal(Path("/proc"), memory_is_fine=True)
    assert what == "error: cannot write to the offload directory /proc"
    assert why.startswith("  why  ")
    assert fix == "  fix  memory.offload_dir=DIR, a directory you may write to"


@pytest.mark.skipif(filesystem(Path("/dev/shm")) != "tmpfs", reason="needs /dev/shm on tmpfs")
def test_a_directory_in_memory_needs_consent():
    what, why, fix = refusal(Path("/dev/shm"))
    assert what == "error: the offload directory /dev/shm is in memory"
    assert "tmpfs" in why
    assert "memory.offload_tmpfs=true" in fix
    check_directory(Path("/dev/shm"), 0, memory_is_fine=True)


def test_a_full_disk_is_refused_before_anything_runs_and_when_it_is_reserved(tmp_path):
    what, why, fix = refusal(tmp_path, 10**18, memory_is_fine=True)
    assert what == f"error: no room in the offload directory {tmp_path}"
    assert why.startswith("  why  the offloaded state takes 1e+09 GB, ")
    assert "free some space" in fix
    with pytest.raises(UserError, match="no room in the offload directory"):
        ScratchFile(tmp_path, 10**15)
    assert list(tmp_path.iterdir()) == []
