"""What ranks inherit: settings of the GPU allocator, unless the user has some; and a torch that cannot use the GPU of a
plan."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.errors import Exit, UserError
from shardwise.launch.allocator import EXPANDABLE, set_allocator
from shardwise.run.rundir import RunDir

OLDER = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}


@pytest.mark.skipif(sys.platform != "linux", reason="torch has growing segments on Linux only")
@pytest.mark.parametrize(
    ("choice", "before", "after"),
    [
        ("auto", {}, {"PYTORCH_ALLOC_CONF": EXPANDABLE}),
        ("expandable", {}, {"PYTORCH_ALLOC_CONF": EXPANDABLE}),
        ("default", {}, {}),
        ("auto", dict(OLDER), OLDER),
        ("expandable", {"PYTORCH_ALLOC_CONF": ""}, {"PYTORCH_ALLOC_CONF": ""}),
    ],
)  # fmt: skip
def test_the_allocator_is_told_unless_the_user_has_told_it(choice: str, before: dict, after: dict) -> None:
    set_allocator(choice, before)
    assert before == after


@pytest.mark.cuda
def test_the_allocator_listens() -> None:
    """Once two tensors of 64 MiB are freed, one of 128 MiB fits where they were, and nothing more is reserved."""
    code = (
        "import torch; size = 64 * 2**20; held = [torch.empty(size, dtype=torch.uint8, device='cuda') for _ in "
        "range(2)];"
        "before = torch.cuda.memory_reserved(); del held; torch.empty(2 * size, dtype=torch.uint8, device='cuda');"
        "print(torch.cuda.memory_reserved() - before)"
    )
    environment = {key: value for key, value in os.environ.items() if not key.endswith("_ALLOC_CONF")}
    set_allocator("auto", environment)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use a GPU here")
def test_a_plan_for_a_gpu_that_torch_cannot_use_is_refused_in_words(tmp_path: Path) -> None:
    from shardwise.launch.worker import check_cuda

    with pytest.raises(UserError) as caught:
        check_cuda(RunDir(tmp_path))
    assert caught.value.code == Exit.HARDWARE and len(str(caught.value).splitlines()) == 3
    assert f"CUDA_VISIBLE_DEVICES= shardwise resume {tmp_path}" in caught.value.fix
