"""Predictions against measurements, and against figures one can compute by hand."""

from __future__ import annotations

import pytest
import torch

from shardwise.memory.usage import saved_bytes
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.model.presets import preset
from shardwise.plan.activations import activation_bytes
from shardwise.plan.plan import Plan
from shardwise.plan.predict import Rates, predict_memory, predict_step

FAMILIES = [
    ("tiny", {}),
    ("tiny-moe", {}),
    ("smollm2-135m", {"num_layers": 2, "vocab": 1000}),
    ("gpt2", {"num_layers": 2, "vocab": 1000}),
    ("qwen3-0.6b", {"num_layers": 2, "vocab": 1000}),
    ("gemma2-2b", {"num_layers": 2, "vocab": 1000, "hidden": 256, "ffn": 512}),
    ("deepseek-v3", {"num_layers": 4, "hidden": 256, "num_heads": 4, "num_kv_heads": 4, "vocab": 1000, "ffn": 512,
                     "expert_ffn": 128, "num_experts": 16}),
]  # fmt: skip


@pytest.mark.parametrize("name, overrides", FAMILIES, ids=[name for name, _ in FAMILIES])
def test_counted_activations_are_what_torch_saves(name, overrides):
    spec = preset(name).with_overrides(overrides)
    model = Decoder(spec)
    initialize(model, 0)
    tokens = torch.zeros(1, 128, dtype=torch.long)
    assert activation_bytes(spec, 1, 128, 4) == pytest.approx(saved_bytes(model, tokens, tokens), rel=0.06)


def plan(**changes) -> Plan:
    values = dict(device="cuda", precision="fp32", seq_len=128, global_batch=8, micro_batch=2, num_steps=1,
                  threads_per_rank=1, reason="", dp=2)  # fmt: skip
    return Plan(**(values | changes))


def test_states_take_sixteen_bytes_per_parameter_with_adam_in_fp32():
    spec = preset("llama2-7b")
    memory = predict_memory(spec, plan(), "adamw")
    assert memory["weights"] + memory["gradients"] + memory["optimizer"] == 16 * spec.num_parameters


def test_step_time_is_work_over_rate():
    spec = preset("tiny")
    slow, fast = (predict_step(spec, plan(), "adamw", Rates(flops, 1e11)) for flops in (1e11, 2e11))
    assert slow["compute"] == pytest.approx(2 * fast["compute"])
    assert slow["optimizer"] == fast["optimizer"]


def test_rows_cover_the_batch_once():
    four = plan(dp=4, micro_batch=1)
    assert [row for rank in range(4) for row in four.rows(rank)] == list(range(8))
    assert Plan.from_dict(four.to_dict()) == four
