"""Offloading beside a GPU: the same losses as without, and memory that leaves the device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardwise.prove.reference import Trial, train_plain
from shardwise.prove.trial import build_trial, train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.presets import preset

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("repeatable_on_gpu"),
]

SIZES = {"num_layers": 3, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
SPEC = preset("tiny").with_overrides(SIZES)
WAYS = {
    "optimizer": {"offload": "optimizer"},
    "all": {"offload": "all"},
    "nvme": {"offload": "optimizer", "offload_to": "nvme", "offload_buffer": 2**18},
}
LIMITS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-3}
"""fp32: the CPU's fused Adam rounds otherwise than the GPU's, and clipping divides by an inverse. bf16: such a
rounding may turn one of a weight's bf16 copies over, 0.4 % of that weight."""


@pytest.mark.parametrize("microbatch", [2, 8])
@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("way", WAYS)
def test_one_gpu_trains_as_without_offloading(way: str, precision: str, microbatch: int, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    attention = "math" if precision == "fp64" else "auto"
    trial = Trial(num_steps=4, precision=precision, attention=attention, seq_len=32, micro_batch=microbatch)
    plan = replace(trial_plan(trial, **WAYS[way], offload_dir=str(tmp_path)), device="cuda")
    record = train_in_layout(SPEC, plan, trial, 0, device)
    (losses, norms, gradients, _), worst = compare(record, train_plain(SPEC, trial, device))
    assert max(losses, norms) < LIMITS[precision], worst
    assert gradients < max(LIMITS[precision], 1e-5), worst


@pytest.mark.parametrize("way", ["optimizer", "all"])
def test_state_is_not_on_the_gpu(way: str, tmp_path: Path) -> None:
    device = torch.device("cuda", 0)
    trial = Trial(precision="fp32")
    engine = build_trial(SPEC, replace(trial_plan(trial, **WAYS[way]), device="cuda"), trial, 0, device)
    before = torch.cuda.memory_allocated(device)
    optimizer = engine.optimizer(trial.optimizer)
    assert torch.cuda.memory_allocated(device) == before
    masters = [piece.master for group in optimizer.groups for piece in group.pieces]  # type: ignore[attr-defined]
    assert {master.device.type for master in masters} == {"cpu"}
    assert all(master.is_pinned() for master in masters)
