"""Silent corruption: one bit that one rank loses is found, named and repaired, in every layout that has replicas."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import losses_of
from guarded import flip_bit, flip_in_layouts, prepare_run, run_rank
from ranks import RankPool

from shardwise.errors import Exit
from shardwise.run.replica_check import EXACT, _folded, bits_of
from shardwise.run.rundir import RunDir

LAYOUTS: tuple[dict[str, Any], ...] = (
    {"dp": 4},
    {"dp": 4, "zero": 3, "replicate": 2},
    {"dp": 2, "tp": 2, "sequence": True},
    {"tp": 4},
    {"dp": 2, "pp": 2, "split": (1, 1)},
    {"dp": 2, "cp": 2},
    {"dp": 4, "ep": 2},
)


def trained(ranks: RankPool, name: str, world: int, *words: str, flips: tuple[int, int, str]) -> tuple[RunDir, str]:
    run = prepare_run(name, world, f"parallel.layout=dp={world}", *words)
    found = ranks.run(run_rank, world, str(run.path.resolve()), (), flips, timeout=120)
    assert {code for code, _ in found} == {Exit.DONE}, found[0][1]
    return run, found[0][1]


def weights_of(run: RunDir) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (run.checkpoints / "step-9").glob("*.safetensors")}


def test_of_three_the_two_are_right(ranks: RankPool, workdir: Path) -> None:
    """Seen at the first comparison, by rank, host and tensor; restored, so that it is seen once. What was saved between
    is left behind and saved again."""
    words = ["run.check_replicas=4", "train.global_batch=9", "train.micro_batch=3"]
    run, said = trained(ranks, "three", 3, *words, flips=(1, 5, "exp_avg"))
    (line,) = [json.loads(text) for text in run.metrics.read_text().splitlines() if '"repaired"' in text]
    assert (line["step"], line["rank"], line["host"], line["from_rank"]) == (7, 1, socket.gethostname(), 0)
    assert any(name.startswith("exp_avg of ") for name in line["tensors"])
    assert f"repaired step 7: rank 1 ({socket.gethostname()}) held other bits of " in said
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["abandoned-step-6", "step-3", "step-7", "step-9"]


def test_of_two_nobody_knows_and_the_run_goes_back(ranks: RankPool, workdir: Path) -> None:
    """It ends with the bits of a run in which nothing happened. The checkpoint of step 6 has the damage in it, which
    the comparison behind it shows."""
    run, said = trained(ranks, "two", 2, flips=(0, 5, ""))
    assert "back     from step 7 to the checkpoint of step 3: ranks 0 (" in said and "no majority" in said
    assert (run.checkpoints / "abandoned-step-6").is_dir() and not run.passed_over.exists()
    undisturbed, _ = trained(ranks, "undisturbed", 2, flips=(0, 99, ""))
    assert losses_of(run.path) == losses_of(undisturbed.path)
    assert weights_of(run) == weights_of(undisturbed) and len(weights_of(run)) == 6


def test_without_a_checkpoint_from_before_the_run_ends_and_says_why(ranks: RankPool, workdir: Path) -> None:
    run = prepare_run("lost", 2, "parallel.layout=dp=2", "run.check_replicas=2")
    found = ranks.run(run_rank, 2, str(run.path.resolve()), (), (1, 1, ""), timeout=120)
    assert [code for code, _ in found] == [Exit.HARDWARE] * 2
    assert "error: step 2: replicas of the model do not hold the same bits any more" in found[0][1]
    assert "there is no good checkpoint of before" in found[0][1] and not any(run.checkpoints.iterdir())


def test_every_layout_with_replicas_sees_a_bit(ranks: RankPool) -> None:
    """And none is alarmed without one: what replicas compute is the same to the last bit."""
    for rank, by_layout in enumerate(ranks.run(flip_in_layouts, 4, LAYOUTS, timeout=120)):
        for layout, (was_well, repaired, trouble, is_well) in zip(LAYOUTS, by_layout, strict=True):
            about = f"rank {rank}, {layout}"
            assert was_well, about
            assert {wrong for wrong, _ in repaired} <= {3}, about
            if layout in ({"dp": 4}, {"tp": 4}, {"dp": 2, "cp": 2}):
                assert len(repaired) >= 4 and not trouble and is_well, about
                assert {"norm.weight", "exp_avg of norm.weight"} <= {name for _, name in repaired}, about
            else:
                assert "ranks" in trouble and "no majority" in trouble and not is_well, about


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (8, 3), (5, 64)])
def test_a_number_changes_with_every_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 255, (*shape, torch.empty(0, dtype=dtype).itemsize), dtype=torch.uint8)
    tensor = tensor.view(dtype).squeeze(-1)
    before = int(_folded(bits_of(tensor)))
    assert 0 <= before <= EXACT and float(before) == before
    raw = tensor.view(-1).view(torch.uint8)
    for byte in range(len(raw)):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            assert int(_folded(bits_of(tensor))) != before, (byte, bit)
            raw[byte] ^= 1 << bit
    assert int(_folded(bits_of(tensor))) == before
    flip_bit(tensor)
    assert int(_folded(bits_of(tensor))) != before
