"""The script of docs/any-model.md is run as it stands: in one process, which is a warm one, and under torchrun on
two."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from blocks import commands_of
from commands import warm_program

if TYPE_CHECKING:
    from ranks import RankPool

PAGE = Path(__file__).parents[2] / "docs" / "any-model.md"


def under_torchrun(script: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script.name],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )


def losses(done: subprocess.CompletedProcess[str]) -> list[list[float]]:
    assert done.returncode == 0, done.stdout + done.stderr
    return [[float(number) for number in re.findall(r"\d+\.\d+", line)] for line in done.stdout.splitlines()]


def test_the_script_gives_the_same_losses_alone_and_on_two_ranks(ranks: RankPool, tmp_path: Path) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1
    script = tmp_path / "train.py"
    script.write_text(blocks[0])
    alone, together = losses(warm_program(ranks, script, cwd=tmp_path)), losses(under_torchrun(script))
    assert len(alone) == len(together) == 20 and alone[-1][0] < alone[0][0] - 1, "it learns"
    for one, two in zip(alone, together, strict=True):
        assert two == pytest.approx(one, abs=1e-4)


def test_the_page_shows_these_two_commands() -> None:
    assert [command.text for command in commands_of(PAGE)] == [
        "python3 train.py",
        "torchrun --nproc-per-node=2 train.py",
    ]
