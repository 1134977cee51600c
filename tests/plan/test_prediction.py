"""Predictions against measurements, and against figures one can compute by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardwise.memory.recompute import apply_recompute
from shardwise.memory.usage import saved_bytes
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.parallel.context.sequence_split import ContextParallel, apply_context_parallel
from shardwise.parallel.tensor.collectives import TensorParallel
from shardwise.parallel.tensor.slices import apply_tensor_parallel
from shardwise.plan.prediction.activations import (
    TokenShare,
    head_activation_bytes,
    kept_activations,
    layer_activations,
)
from shardwise.plan.prediction.lifetimes import APART, WORKSPACE_BYTES
from shardwise.plan.prediction.memory import predict_memory
from shardwise.plan.prediction.rank_share import rank_shares
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig
from shardwise.spec.split import even_split, tensor_slice

FAMILIES = [
    ("tiny", {}),
    ("tiny-moe", {}),
    ("smollm2-135m", {"num_layers": 2, "vocab": 1000}),
    ("gpt2", {"num_layers": 2, "vocab": 1000}),
    ("qwen3-0.6b", {"num_layers": 2, "vocab": 1000}),
    ("gemma2-2b", {"num_layers": 2, "vocab": 1000, "hidden": 256, "ffn": 512}),
    (
        "deepseek-v3",
        {
            "num_layers": 4,
            "hidden": 256,
            "num_heads": 4,
            "num_kv_heads": 4,
            "vocab": 1000,
            "ffn": 512,
            "expert_ffn": 128,
            "num_experts": 16,
        },
    ),
]


@pytest.mark.parametrize("mode", ["none", "full", "selective", "sqrt", "every-2"])
@pytest.mark.parametrize("name, overrides", FAMILIES, ids=[name for name, _ in FAMILIES])
def test_counted_activations_are_what_torch_saves(name, overrides, mode):
    spec = preset(name).with_overrides(overrides)
    model = Decoder(spec)
    initialize(model, 0)
    apply_recompute(list(model.layers.values()), mode)
    tokens = torch.zeros(1, 128, dtype=torch.long)
    layers = kept_activations(spec, spec.layers, mode, TokenShare(128)).between
    counted = 128 * layers * 4 + head_activation_bytes(spec, 128, 4)
    assert counted == pytest.approx(saved_bytes(model, tokens, tokens), rel=0.05)
    assert mode != "none" or layers == layer_activations(spec, spec.layers, TokenShare(128))


def test_recomputation_keeps_what_the_textbook_says():
    """A layer in 16 bit, s tokens, b sequences, width h, with fused attention: 34 sbh without recomputation, of which
    2 sbh are dropout masks, which this decoder does not have; 2 sbh with full recomputation."""
    spec, sbh = preset("gpt2"), 2 * 128 * preset("gpt2").hidden
    per_layer = [
        2 * 2 * 128 * kept_activations(spec, spec.layers, mode, TokenShare(128)).between / spec.num_layers
        for mode in ("none", "full")
    ]
    assert per_layer[0] / sbh == pytest.approx(34 - 2, rel=0.01)
    assert per_layer[1] == 2 * sbh


def test_recomputation_saves_memory():
    """What is computed again is there for one block at a time."""
    none, full, half, selective, groups = (
        predict_memory(LLAMA, plan(device="cpu", dp=1, recompute=mode), "adamw")["activations"]
        for mode in ("none", "full", "every-2", "selective", "sqrt")
    )
    assert full < groups < half < none and full < selective < none
    block = 2 * 128 * 4 * layer_activations(LLAMA, LLAMA.layers[:1], TokenShare(128))
    states = 32 * 2 * 128 * 4 * LLAMA.hidden
    assert full == states + block - states // 32


def test_a_split_backward_holds_what_it_has_computed_again():
    def activations(schedule: str, mode: str) -> int:
        here = plan(dp=1, pp=2, global_batch=16, micro_batch=2, schedule=schedule, split=(16, 16), recompute=mode)
        return predict_memory(LLAMA, here, "adamw")["activations"]

    assert activations("zero-bubble", "full") > activations("1f1b", "full")
    assert activations("1f1b", "full") < activations("1f1b", "none")


def test_blocks_that_are_computed_again_together_stay_gathered():
    one, groups = (
        predict_memory(LLAMA, plan(dp=8, zero=3, recompute=mode, micro_batch=1), "adamw")["gathered"]
        for mode in ("full", "sqrt")
    )
    assert groups == pytest.approx(6 / 2 * one, rel=0.01)  # 32 layers in 6 groups of 5 or 6


def saved_in_slices(families) -> list[tuple[int, int]]:
    """On every rank: what a forward pass over all ranks keeps, without and with sequence parallelism."""
    found = []
    for name, overrides in families:
        spec = preset(name).with_overrides(overrides)
        saved = []
        for sequence in (False, True):
            model = Decoder(spec)
            initialize(model, 0)
            apply_tensor_parallel(model, TensorParallel(dist.group.WORLD, sequence))
            tokens = torch.zeros(1, 128, dtype=torch.long)
            saved.append(saved_bytes(model, tokens, tokens))
        found.append(tuple(saved))
    return found


def test_counted_activations_of_a_slice_are_what_torch_saves(ranks):
    """Norms stay whole without sequence parallelism and are shared with it; what enters a region is whole on every
    rank."""
    families = [(name, {"num_heads": 8, "num_kv_heads": 4} if "smollm" in name else {}) for name, _ in FAMILIES]
    families = [(name, overrides | changes) for (name, overrides), (_, changes) in zip(FAMILIES, families, strict=True)]
    measured = ranks.run(saved_in_slices, 2, families)[0]
    for (name, overrides), saved in zip(families, measured, strict=True):
        part = tensor_slice(preset(name).with_overrides(overrides), 2)
        for token_parts, size in zip((1, 2), saved, strict=True):
            layers = layer_activations(part, part.layers, TokenShare(128, token_parts))
            counted = 128 * 4 * layers + head_activation_bytes(part, 128, 4, token_parts)
            assert counted == pytest.approx(size, rel=0.05), (name, token_parts)


def saved_in_parts(families, kind: str) -> list[int]:
    """Of one family after another, by one of two ranks that share a sequence."""
    found = []
    for name, overrides in families:
        model = Decoder(preset(name).with_overrides(overrides))
        initialize(model, 0)
        apply_context_parallel(model, ContextParallel(dist.group.WORLD, kind))
        tokens = torch.zeros(1, 128, dtype=torch.long)
        found.append(saved_bytes(model, tokens, tokens))
    return found


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
def test_counted_activations_of_a_part_of_the_sequence_are_what_torch_saves(ranks, kind):
    families = [
        (name, overrides | ({"num_heads": 8, "num_kv_heads": 4} if "smollm" in name else {}))
        for name, overrides in FAMILIES
    ]
    measured = ranks.run(saved_in_parts, 2, families, kind)[0]
    for (name, overrides), size in zip(families, measured, strict=True):
        spec = preset(name).with_overrides(overrides)
        share = TokenShare(0 if kind == "ring" else 128, exchanged=kind == "ulysses")
        layers = layer_activations(spec, spec.layers, share)
        counted = 64 * 4 * layers + head_activation_bytes(spec, 64, 4)
        assert counted == pytest.approx(size, rel=0.06), name


def plan(**changes) -> Plan:
    values = dict(
        device="cuda",
        precision="fp32",
        seq_len=128,
        global_batch=8,
        micro_batch=2,
        num_steps=1,
        threads_per_rank=1,
        reason="",
        dp=2,
    )
    return Plan(**(values | changes))


# Memory ---------------------------------------------------------------------------------------------------------------

STATES = ("weights", "gathered", "gradients", "optimizer")


def states(spec, here: Plan, optimizer: str = "adamw") -> int:
    memory = predict_memory(spec, here, optimizer)
    return sum(memory[name] for name in STATES)


def test_states_take_sixteen_bytes_per_parameter_with_adam_in_fp32():
    spec = preset("llama2-7b")
    memory = predict_memory(spec, plan(global_batch=4), "adamw")
    assert memory["weights"] + memory["gradients"] + memory["optimizer"] == 16 * spec.num_parameters
    assert memory["gathered"] == 0


LLAMA = preset("llama2-7b")
P = LLAMA.num_parameters
BLOCK = P / 32 * 0.961  # one of 32 layers; the rest is embedding and head
ZERO = [  # precision, stage, micro-batches -> bytes per parameter: sharded, whole
    ("fp32", 0, 1, 0, 16),
    ("fp32", 0, 4, 0, 16 + 4),  # DDP: what micro-batches add up, and the buckets
    ("bf16", 0, 4, 0, 18),
    ("fp64", 0, 1, 0, 32),
    ("bf16-true", 0, 1, 0, 8),
    ("bf16", 1, 4, 16, 2 + 4),
    ("bf16", 1, 1, 16, 2),
    ("bf16", 2, 4, 16, 2),
    ("fp32", 1, 4, 16, 4 + 4),
    ("fp32", 1, 1, 16, 4),
    ("fp32", 2, 4, 16, 4),
    ("bf16", 3, 4, 16, 0),
    ("fp32", 3, 4, 16, 0),
]


@pytest.mark.parametrize("precision, zero, microbatches, sharded, whole", ZERO)
def test_every_zero_stage_holds_what_its_line_of_the_table_says(precision, zero, microbatches, sharded, whole):
    here = plan(dp=8, global_batch=64, micro_batch=8 // microbatches, precision=precision, zero=zero)
    assert here.num_microbatches == microbatches
    held = states(LLAMA, here)
    if zero == 3:  # and two blocks
        held -= predict_memory(LLAMA, here, "adamw")["gathered"]
    assert held == pytest.approx(P * (sharded / 8 + whole), rel=1e-6)


@pytest.mark.parametrize("microbatches, gradients", [(1, 2), (4, 4)])
def test_copies_that_stay_are_weights_and_gradients_are_as_wide_as_they_must_be(microbatches, gradients):
    here = plan(dp=1, global_batch=4, micro_batch=4 // microbatches, precision="bf16", copies=True)
    memory = predict_memory(LLAMA, here, "adamw")
    assert [memory[name] / P for name in STATES] == [6, 0, gradients, 8]
    adapted = predict_memory(LLAMA, here, "adamw", AdapterConfig(kind="lora", rank=8))
    assert adapted["weights"] == pytest.approx(2 * P, rel=0.01)  # what is frozen is there once
    assert adapted["gradients"] * 8 == adapted["optimizer"] * gradients


@pytest.mark.parametrize("precision, size", [("bf16", 2), ("fp32", 4)])
def test_stage_3_gathers_two_blocks(precision, size):
    here = plan(dp=8, zero=3, precision=precision, micro_batch=1)
    assert predict_memory(LLAMA, here, "adamw")["gathered"] == pytest.approx(2 * BLOCK * size, rel=0.01)
    tied = replace(LLAMA, tied=True)
    table = LLAMA.vocab * LLAMA.hidden  # stays gathered: both ends of the model use it
    assert predict_memory(tied, here, "adamw")["gathered"] == pytest.approx((2 * BLOCK + table) * size, rel=0.01)


def test_hybrid_sharding_divides_by_its_shards_only():
    full, hybrid = (predict_memory(LLAMA, plan(dp=8, zero=3, replicate=n, micro_batch=1), "adamw") for n in (1, 4))
    assert hybrid["optimizer"] == pytest.approx(4 * full["optimizer"])
    assert hybrid["gathered"] == full["gathered"]


def test_optimizers_are_charged_for_their_own_states():
    assert [states(LLAMA, plan(global_batch=4), name) / P for name in ("sgd", "momentum", "adamw")] == [8, 12, 16]


def test_tensor_parallelism_divides_the_states_and_most_activations():
    whole, half = (predict_memory(LLAMA, plan(tp=tp), "adamw") for tp in (1, 2))
    assert half["weights"] == pytest.approx(whole["weights"] / 2, rel=0.01)
    shared = predict_memory(LLAMA, plan(tp=2, sequence=True), "adamw")
    assert whole["activations"] / 2 < shared["activations"] < half["activations"] < whole["activations"]


def test_the_fullest_rank_of_a_pipeline_counts():
    spec = preset("gpt2")
    even, front = (predict_memory(spec, plan(dp=1, pp=2, split=split), "adamw") for split in ((6, 6), (10, 2)))
    assert even["weights"] < front["weights"]
    # GPT-2 is tied: both ends have the table, and the last rank the final norm.
    last = rank_shares(spec, plan(dp=1, pp=2, split=(1, 11)))[1]
    table = spec.vocab * spec.hidden
    layers = 11 * (spec.num_parameters - spec.num_embedding_parameters - spec.num_norm_parameters) // 12
    assert last.num_parameters == table + layers + spec.num_norm_parameters


def test_schedules_that_hold_more_need_more():
    def activations(schedule: str, stages: int = 1) -> int:
        here = plan(
            dp=1,
            pp=4,
            micro_batch=1,
            global_batch=16,
            schedule=schedule,
            virtual_stages=stages,
            split=even_split(32, 4 * stages),
        )
        return predict_memory(LLAMA, here, "adamw")["activations"]

    one, gpipe = activations("1f1b"), activations("gpipe")
    assert gpipe == pytest.approx(4 * one, rel=0.15)  # 16 micro-batches instead of 4; 1f1b has the logits only once
    assert one < activations("zero-bubble") < 1.05 * one  # as much on every rank, the last one with its logits too
    assert 1.05 * one < activations("interleaved", 2) < gpipe
    assert activations("zbv", 2) == pytest.approx(one, rel=0.1)


# One GPU, as measured -------------------------------------------------------------------------------------------------

JOBS = {
    "8b-adamw8bit": ("llama3-8b", dict(precision="bf16", recompute="full"), "adamw8bit", AdapterConfig()),
    "8b-true": ("llama3-8b", dict(precision="bf16-true", recompute="selective"), "adamw", AdapterConfig()),
    "3b-offload": (
        "llama3.2-3b",
        dict(precision="bf16", recompute="full", offload="optimizer"),
        "adamw",
        AdapterConfig(),
    ),
    "70b-qlora": (
        "llama3-70b",
        dict(precision="bf16-true", recompute="full"),
        "adamw",
        AdapterConfig(kind="qlora", rank=16, targets=("all-linear",)),
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_the_peak_of_large_jobs_on_an_h200_is_predicted_within_5_percent(name):
    """benchmarks/gpu/fit.py measured them; whoever changes the prediction must keep to it."""
    measured = json.loads((Path(__file__).parents[2] / "benchmarks/results/fit_h200.json").read_text())[name]
    model, settings, optimizer, adapter = JOBS[name]
    here = plan(dp=1, global_batch=1, micro_batch=1, seq_len=measured["tokens"], **settings)
    total = sum(predict_memory(preset(model), here, optimizer, adapter).values())
    assert measured["peak_gib"] * 2**30 == pytest.approx(total, rel=0.05)


def test_with_one_micro_batch_gradients_and_activations_are_never_full_at_once():
    one = predict_memory(LLAMA, plan(dp=1, global_batch=2), "adamw")
    two = predict_memory(LLAMA, plan(dp=1, global_batch=4), "adamw")
    assert two[APART] == 0 and one[APART] < 0
    kernels = WORKSPACE_BYTES["cuda"]
    first, last = one["activations"] + one["allocator"] - kernels, one["gradients"]
    assert sum(one.values()) == one["weights"] + one["optimizer"] + max(first, last) + kernels
