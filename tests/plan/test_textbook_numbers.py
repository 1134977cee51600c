"""Figures that every course on distributed training repeats, from the planner's own functions."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.cluster.describe.table import known_cluster
from shardwise.plan.prediction.collectives import Network
from shardwise.plan.prediction.memory import predict_memory
from shardwise.spec.cluster import ClusterSpec, Link
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schedules import schedule_actions, stage_owners
from shardwise.spec.timeline import simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from stacks.foreign import ForeignStack

TEXTBOOK = ForeignStack(name="textbook", half_weights=True, gradient_bytes=2)
"""bf16 weights and gradients, fp32 masters and moments: 2 + 2 + 12 bytes per parameter, cut as the ZeRO paper cuts
them."""


def of_size(parameters: float) -> ModelSpec:
    """A model of so many parameters: as deep and wide as usual, its vocabulary makes up the rest."""
    shape = preset("llama2-7b" if parameters < 1e10 else "llama3.1-405b").with_overrides(
        {"num_layers": round(parameters / (2.1e8 if parameters < 1e10 else 3.2e9)), "vocab": 1, "tied": True}
    )
    rest = round(parameters) - shape.num_parameters
    return shape.with_overrides({"vocab": 1 + rest // shape.hidden})


def states_gb(parameters: float, gpus: int, zero: int) -> float:
    """Weights, gradients and optimizer of one rank. One sequence of one token: activations are not asked for."""
    model = of_size(parameters)
    assert model.num_parameters == pytest.approx(parameters, rel=1e-5)
    plan = Plan(
        device="cuda",
        precision="bf16",
        seq_len=1,
        global_batch=gpus,
        micro_batch=1,
        num_steps=1,
        threads_per_rank=1,
        reason="textbook",
        dp=gpus,
        zero=zero,
    )
    parts = predict_memory(model, plan, "adamw", stack=TEXTBOOK)
    return sum(parts[name] for name in ("weights", "gradients", "optimizer")) / 1e9


@pytest.mark.parametrize("zero, gb", [(0, 112), (1, 38.5), (2, 26.25), (3, 14)])
def test_7b_on_8_gpus_takes_112_or_38_or_26_or_14_gb_by_zero_stage(zero, gb):
    assert states_gb(7e9, 8, zero) == pytest.approx(gb, rel=1e-3)


@pytest.mark.parametrize("zero, gb", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_7_and_a_half_b_on_64_gpus_takes_120_or_31_or_17_or_2_gb_by_zero_stage(zero, gb):
    assert states_gb(7.5e9, 64, zero) == pytest.approx(gb, abs=0.05)


def test_a_trillion_parameters_on_1024_gpus_take_16_gb_each():
    assert round(states_gb(1e12, 1024, 3)) == 16


def test_a_ring_all_reduce_of_2_gb_over_8_gpus_at_25_gb_per_second_takes_0_14_s():
    wire = Link("pcie", 8, 25e9, alpha=0.0, share=1.0, half=0.0)
    cluster = replace(known_cluster("a100-80", 1, 8), tiers=(wire,))
    assert Network(cluster).all_reduce(2e9, 8) == pytest.approx(0.14, rel=1e-3)


@pytest.mark.parametrize("micro_batches, bubble", [(4, 3 / 7), (16, 3 / 19)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_pipeline_of_4_stages_idles_3_7ths_with_4_micro_batches_and_3_19ths_with_16(schedule, micro_batches, bubble):
    seconds = {"F": 1.0, "B": 2.0}
    actions, owners = schedule_actions(schedule, 4, 1, micro_batches), stage_owners(schedule, 4, 1)
    assert simulate(actions, owners, lambda action: seconds[action.kind]).bubble_fraction == pytest.approx(bubble)


def test_175b_parameters_on_300b_tokens_are_3_14e23_flops():
    model = preset("gpt3-175b")
    assert model.flops_per_token(1) * 300e9 == pytest.approx(3.14e23, rel=2e-3)
    attention = model.flops_per_token(2048) / model.flops_per_token(1) - 1  # on top, under the causal mask
    assert attention == pytest.approx(2048 / (12 * model.hidden), rel=0.01)


def test_the_cluster_of_these_numbers_is_no_special_case():
    """The same ring over the links of a data sheet is slower than its wires, never faster."""
    cluster: ClusterSpec = known_cluster("a100-80", 1, 8)
    assert Network(cluster).all_reduce(2e9, 8) > 2 * 7 / 8 * 2e9 / cluster.tiers[0].bandwidth
