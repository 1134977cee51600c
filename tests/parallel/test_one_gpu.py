"""One GPU: the engine that every layout uses, against the plain model on the same device."""

from __future__ import annotations

import pytest
import torch

from shardwise.prove.reference import Trial, train_plain
from shardwise.prove.trial import train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.presets import preset

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.usefixtures("repeatable_on_gpu"),
]

SIZES = {"num_layers": 3, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
LIMITS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-5, "bf16-true": 1e-5}


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_the_engine_on_one_gpu_computes_what_the_plain_model_computes(name: str, precision: str) -> None:
    device = torch.device("cuda", 0)
    spec = preset(name).with_overrides(SIZES | ({"expert_ffn": 64} if name == "tiny-moe" else {}))
    attention = "math" if precision == "fp64" or name == "tiny-moe" else "auto"  # cuDNN's backward is not repeatable
    trial = Trial(num_steps=4, precision=precision, attention=attention, seq_len=32)
    record = train_in_layout(spec, trial_plan(trial), trial, 0, device)
    (losses, norms, gradients, _), worst = compare(record, train_plain(spec, trial, device))
    assert losses <= LIMITS[precision], (losses, worst)
    assert norms <= (1e-12 if precision == "fp64" else 1e-2), norms
    assert gradients <= (1e-10 if precision == "fp64" else 1e-2), (gradients, worst)
