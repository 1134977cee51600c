"""Adapters on one GPU: the same four bits as on a CPU, and the engine against the plain model on the same device."""

from __future__ import annotations

import pytest
import torch

from shardwise.config.schema import AdapterConfig
from shardwise.model.nf4 import Packed, dequantize, quantize
from shardwise.model.presets import preset
from shardwise.run.reference import Trial, train_plain
from shardwise.run.trial import train_in_layout, trial_plan
from shardwise.run.verify import compare

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("repeatable_on_gpu"),
]

SIZES = {"num_layers": 3, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
LIMITS = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 1e-5}


def test_four_bits_are_read_as_on_a_cpu() -> None:
    """What is rounded may differ where a mean is summed in another order; what is read from the same bits may not."""
    packed = quantize(torch.randn(70, 300, generator=torch.Generator().manual_seed(0)), torch.bfloat16)
    there = Packed(*(part.cuda() for part in packed))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantize(there, 300, dtype).cpu(), dequantize(packed, 300, dtype))


@pytest.mark.parametrize("precision", LIMITS)
@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_the_engine_on_one_gpu_trains_the_same_adapters(kind: str, precision: str) -> None:
    device, spec = torch.device("cuda", 0), preset("tiny").with_overrides(SIZES)
    adapter = AdapterConfig(kind=kind, rank=4, targets=("all-linear",), train_also=("*norm",), dropout=0.1)
    attention = "math" if precision == "fp64" else "auto"
    trial = Trial(num_steps=4, precision=precision, attention=attention, seq_len=32, adapter=adapter)
    record = train_in_layout(spec, trial_plan(trial), trial, 0, device)
    (losses, *_), worst = compare(record, train_plain(spec, trial, device))
    assert losses <= LIMITS[precision], (losses, worst)
