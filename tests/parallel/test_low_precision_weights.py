"""16-bit copies that stay between steps, against FSDP2 on one rank, which makes them anew: the same numbers to the
last bit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from shardwise.checkpoint import store
from shardwise.errors import UserError
from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.optim.build import TakesFactor
from shardwise.parallel.data.low_precision_weights import LowPrecisionWeights
from shardwise.plan.prediction.memory import predict_memory
from shardwise.plan.resolve.speed import with_speed
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import build_trial, train_in_layout, trial_batch, trial_plan
from shardwise.prove.verify import prove
from shardwise.run.clock import Clock
from shardwise.run.memory_owners import kept_bytes
from shardwise.run.saving import Saver
from shardwise.run.state import restore_state
from shardwise.run.step import accumulate, run_step
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig, OptimizerConfig, SpeedConfig

CPU = torch.device("cpu")
SHAPE = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 96, "vocab": 128}
PLAIN = preset("tiny").with_overrides(SHAPE)
TIED = preset("tiny").with_overrides(SHAPE | {"tied": True})
EXPERTS = preset("tiny-moe").with_overrides(SHAPE | {"num_experts": 4, "expert_ffn": 32, "aux_loss_coef": 0.1})
ONE = Trial(num_steps=4, precision="bf16", micro_batch=8, clip=0.5)  # the norm is about 1.5: clipping is at work
THREE = replace(ONE, micro_batch=3)
MOMENTUM = OptimizerConfig(name="momentum", lr=1e-2)
LOW_BIT = OptimizerConfig(name="adamw8bit", lr=1e-3)
CASES: dict[str, tuple[ModelSpec, Trial]] = {
    "one micro-batch": (PLAIN, ONE),
    "three micro-batches": (PLAIN, THREE),
    "three, momentum": (PLAIN, replace(THREE, optimizer=MOMENTUM)),
    "one, 8-bit states": (PLAIN, replace(ONE, optimizer=LOW_BIT)),
    "fp16": (PLAIN, replace(THREE, precision="fp16")),
    "fp16 that overflows": (PLAIN, replace(ONE, precision="fp16", loss_scale=2.0**40)),
    "fp8": (PLAIN, replace(THREE, precision="fp8", num_steps=2)),
    "tied": (TIED, THREE),
    "experts": (EXPERTS, THREE),
    "lora": (PLAIN, replace(THREE, adapter=AdapterConfig(kind="lora", rank=4, train_also=("*norm",)))),
    "qlora": (PLAIN, replace(ONE, adapter=AdapterConfig(kind="qlora", rank=4))),
}


def both_ways(cases: list[tuple[ModelSpec, Trial]]) -> list[tuple[Record, Record]]:
    return [
        (
            train_in_layout(spec, trial_plan(trial), trial, 0, CPU),
            train_in_layout(spec, trial_plan(trial, copies=True), trial, 0, CPU),
        )
        for spec, trial in cases
    ]


@pytest.fixture(scope="module")
def records(ranks: Any) -> dict[str, tuple[Record, Record]]:
    [found] = ranks.run(both_ways, 1, list(CASES.values()), timeout=240)
    return dict(zip(CASES, found, strict=True))


def same_bits(found: dict[str, Tensor], truth: dict[str, Tensor]) -> bool:
    return found.keys() == truth.keys() and all(torch.equal(found[name], truth[name]) for name in truth)


@pytest.mark.parametrize("name", CASES)
def test_copies_compute_what_fsdp2_computes_to_the_last_bit(name: str, records: Any) -> None:
    truth, record = records[name]
    assert record.losses == truth.losses
    assert same_bits(record.parameters, truth.parameters)
    assert {value.dtype for value in record.parameters.values()} == {torch.float32}
    if name == "fp16 that overflows":
        assert not any(math.isfinite(norm) for norm in record.norms)
        return
    assert record.norms == truth.norms and len(set(record.losses)) == len(record.losses)
    width = 2 if CASES[name][1].micro_batch == 8 else 4
    assert {gradient.dtype.itemsize for gradient in record.gradients.values()} == {width}
    assert same_bits({name: g.float() for name, g in record.gradients.items()}, truth.gradients)


# Checkpoints ---------------------------------------------------------------------------------------------------------


def resumed_losses(spec: ModelSpec, trial: Trial, ways: list[bool], folder: str) -> list[list[float]]:
    """Four steps; after the second the state goes through a file, into an engine with or without copies."""

    def build(copies: bool) -> tuple[Any, Any, Plan]:
        plan = trial_plan(trial, copies=copies)
        engine = build_trial(spec, plan, trial, 0, CPU)
        return engine, engine.optimizer(trial.optimizer), plan

    def steps(engine: Any, optimizer: Any, plan: Plan, numbers: tuple[int, int]) -> list[float]:
        found = []
        for step in numbers:
            batch, targets = trial_batch(spec, plan, trial, step, 0)
            result = run_step(engine, optimizer, batch, num_targets=targets, lr=1e-3, clip=trial.clip, clock=Clock(CPU))
            found.append(result.loss)
        return found

    found = []
    for first in ways:
        before = build(first)
        steps(*before, (1, 2))
        place = Path(folder) / f"from-{first}" / "step-2"
        Saver(place.parent, before[0], before[1]).save(2, dict)
        for second in ways:
            after = build(second)
            restore_state(after[0], after[1], store.Checkpoint(place, 2))
            found.append(steps(*after, (3, 4)))
    return found


def test_a_run_goes_on_with_copies_or_without_them(ranks: Any, tmp_path: Path, records: Any) -> None:
    straight = records["three micro-batches"][0].losses[2:]
    [found] = ranks.run(resumed_losses, 1, PLAIN, THREE, [True, False], str(tmp_path))
    assert found == [straight] * 4


# Memory --------------------------------------------------------------------------------------------------------------


def held_bytes(spec: ModelSpec, trial: Trial) -> tuple[dict[str, int], dict[str, int], bool]:
    plan = trial_plan(trial, copies=True)
    engine = build_trial(spec, plan, trial, 0, CPU)
    optimizer = engine.optimizer(trial.optimizer)
    batch, targets = trial_batch(spec, plan, trial, 1, 0)
    run_step(engine, optimizer, batch, num_targets=targets, lr=1e-3, clip=0.5, clock=Clock(CPU))
    between = kept_bytes(engine, optimizer)
    accumulate(engine, batch, targets, Clock(CPU))
    return between, kept_bytes(engine, optimizer), isinstance(optimizer, TakesFactor)


@pytest.mark.parametrize(("trial", "wide"), [(ONE, 2), (THREE, 4)])
def test_a_rank_holds_both_formats_and_narrow_gradients_where_one_is_enough(
    trial: Trial, wide: int, ranks: Any
) -> None:
    [(between, full, clips)] = ranks.run(held_bytes, 1, PLAIN, trial)
    size = PLAIN.num_parameters
    assert between == {"parameters": 6 * size, "gradients": 0, "optimizer": 8 * size}
    assert full == between | {"gradients": wide * size}
    assert clips  # no pass over all gradients for that
    predicted = predict_memory(PLAIN, trial_plan(trial, copies=True), "adamw")
    assert [predicted[name] for name in ("weights", "gradients", "optimizer", "gathered")] == [*full.values(), 0]


def test_masters_are_the_weights_that_were_there_and_what_is_frozen_has_none() -> None:
    """So building takes the fp32 weights and their copies, and nothing else."""
    model = Decoder(TIED)
    initialize(model, 0)
    model.norm.weight.requires_grad_(False)
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    LowPrecisionWeights(model, torch.bfloat16)
    for name, parameter in model.named_parameters():
        master = getattr(parameter, "master", None)
        assert (master is None) == (name == "norm.weight")
        if master is None:
            assert parameter.dtype == torch.float32
        else:
            assert master.data_ptr() == places[name] and torch.equal(parameter, master.bfloat16())


def test_compiled_blocks_have_one_graph_with_copies_and_hooks_on_them() -> None:
    trial = replace(THREE, precision="fp64", micro_batch=2, num_steps=2)
    torch._dynamo.reset()
    counters.clear()
    record = train_in_layout(PLAIN, trial_plan(trial, copies=True, compile="trace"), trial, 0, CPU)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert record.losses == pytest.approx(train_plain(PLAIN, trial).losses, rel=1e-12)


# Plans ---------------------------------------------------------------------------------------------------------------


def test_the_way_of_copies_is_proven_in_fp64_too() -> None:
    plan = trial_plan(THREE, copies=True)
    assert not plan.uses_fsdp
    assert prove(PLAIN, plan, OptimizerConfig(), 0, CPU).largest < 1e-9


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dp": 2}, "dp=2"),
        ({"zero": 3}, "zero=3"),
        ({"precision": "fp32"}, "in fp32"),
        ({"reduce_dtype": "bf16"}, "gradients summed in bf16"),
        ({"offload": "optimizer"}, "offload=optimizer"),
    ],
)
def test_copies_that_cannot_be_are_refused_and_auto_leaves_them(changes: dict[str, Any], why: str) -> None:
    plan = replace(trial_plan(THREE), device="cuda")
    assert with_speed(plan, SpeedConfig(), PLAIN).copies
    assert not with_speed(replace(plan, device="cpu"), SpeedConfig(), PLAIN).copies
    assert with_speed(replace(plan, device="cpu"), SpeedConfig(copies=True), PLAIN).copies
    other = replace(plan, **changes)
    assert not with_speed(other, SpeedConfig(), PLAIN).copies
    with pytest.raises(UserError) as caught:
        with_speed(other, SpeedConfig(copies=True), PLAIN)
    assert why in caught.value.why and "speed.copies=auto" in caught.value.fix
