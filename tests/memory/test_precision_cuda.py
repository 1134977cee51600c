"""What only a GPU can show: fp8's own kernels, torchao's compiled 8-bit step, fp16 with a scaled loss."""

from __future__ import annotations

import pytest
import torch

from shardwise.config.schema import OptimizerConfig
from shardwise.model.presets import preset
from shardwise.run.reference import Trial, train_plain
from shardwise.run.trial import train_in_layout, trial_plan
from shardwise.run.verify import compare

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPEC = preset("tiny").with_overrides(
    {"num_layers": 2, "hidden": 2304, "num_heads": 36, "num_kv_heads": 36, "head_dim": 64, "ffn": 4608, "vocab": 128}
)


@pytest.mark.parametrize("name", ["fp16", "fp16-true", "fp8 rowwise", "fp8 tensorwise", "adamw8bit"])
def test_one_gpu_computes_what_the_plain_model_computes(name: str) -> None:
    precision, _, recipe = name.partition(" ")
    optimizer = OptimizerConfig(lr=1e-3, name=name if name == "adamw8bit" else "adamw")
    precision = "fp32" if name == "adamw8bit" else precision
    trial = Trial(precision=precision, clip=0.0, optimizer=optimizer, fp8_recipe=recipe or "rowwise")
    device = torch.device("cuda")
    plan = trial_plan(trial)
    record = train_in_layout(SPEC, plan, trial, 0, device)
    (losses, _, gradients, _), worst = compare(record, train_plain(SPEC, trial, device))
    # The same kernels on the same numbers; only the order of fp32 sums of micro-batches may differ.
    assert losses <= 1e-4 and gradients <= 1e-3, worst
