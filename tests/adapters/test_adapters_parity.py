"""LoRA and QLoRA in every layout train what one process trains: losses, norms, gradients and trained parameters, in
fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.adapters.nf4 import packed_bytes
from shardwise.interop.peft.targets import linears_of
from shardwise.optim.build import build_optimizer
from shardwise.plan.prediction.memory import predict_memory
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import build_trial, train_in_layout, trial_batch, trial_plan
from shardwise.prove.verify import compare
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig
from shardwise.spec.split import even_split

CPU = torch.device("cpu")
SMALL = {"num_layers": 4, "hidden": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "ffn": 150, "vocab": 53}
SPEC = preset("tiny").with_overrides(SMALL)
LORA = AdapterConfig(kind="lora", rank=3, alpha=6.0, targets=("q", "v", "o", "gate", "down"), train_also=("*norm",))
TRIAL = Trial(global_batch=5, micro_batch=1, seq_len=12, adapter=LORA)
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 process": {},
    "dp=2": {"dp": 2},
    "dp=2 zero=2": {"dp": 2, "zero": 2},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "tp=2": {"tp": 2},
    "tp=2 sp": {"tp": 2, "sequence": True},
    "pp=2": {"pp": 2},
}
MORE: dict[str, dict[str, Any]] = {
    "dp=4 zero=1 replicate=2": {"dp": 4, "zero": 1, "replicate": 2},
    "tp=4": {"tp": 4},
    "dp=2 zero=3 tp=2 sp": {"dp": 2, "zero": 3, "tp": 2, "sequence": True},
    "cp=2 ring": {"cp": 2},
    "zero=3 cp=2 ulysses pp=2": {"cp": 2, "cp_kind": "ulysses", "zero": 3, "pp": 2},
    "pp=2 zbv": {"pp": 2, "schedule": "zbv", "virtual_stages": 2},
    "dp=2 zero=2 pp=2 zero-bubble": {"dp": 2, "zero": 2, "pp": 2, "schedule": "zero-bubble"},
}


def make_plan(fields: dict[str, Any], trial: Trial) -> Plan:
    if fields.get("pp", 1) > 1:
        fields = fields | {"split": even_split(SMALL["num_layers"], fields["pp"] * fields.get("virtual_stages", 1))}
    return trial_plan(trial, **fields)


def trained(spec: ModelSpec, plans: list[Plan], trial: Trial) -> list[Record]:
    """One call of the pool for all layouts of a technique."""
    return [train_in_layout(spec, plan, trial, dist.get_rank(), CPU) for plan in plans]


def worst(spec: ModelSpec, trial: Trial, layouts: dict[str, dict[str, Any]], ranks: Any) -> dict[str, float]:
    truth = train_plain(spec, trial)
    plans = {name: make_plan(fields, trial) for name, fields in layouts.items()}
    found: dict[str, float] = {}
    for world in {plan.world for plan in plans.values()}:
        names = [name for name, plan in plans.items() if plan.world == world]
        records = ranks.run(trained, world, spec, [plans[name] for name in names], trial, timeout=120)[0]
        found |= {name: max(compare(record, truth)[0]) for name, record in zip(names, records, strict=True)}
    return found


FIVE = {name: fields for name, fields in LAYOUTS.items() if name not in ("dp=2", "tp=2")}


@pytest.mark.parametrize(
    "kind, dropout, layouts",
    [("lora", 0.0, LAYOUTS), ("qlora", 0.0, FIVE), ("lora", 0.3, MORE)],
    ids=["lora", "qlora", "dropout"],
)
def test_every_layout_trains_the_same_adapters(kind: str, dropout: float, layouts: Any, ranks: Any) -> None:
    """Dropout too: it follows from the row, wherever that is computed."""
    rows = 5 if layouts is MORE else 3  # unequal numbers on four ranks, or on two
    trial = replace(TRIAL, global_batch=rows, adapter=replace(LORA, kind=kind, dropout=dropout))
    for name, difference in worst(SPEC, trial, layouts, ranks).items():
        assert difference < 1e-9, f"{kind} {name}: {difference}"


def test_dropout_is_at_work() -> None:
    plain, dropped = (train_plain(SPEC, replace(TRIAL, adapter=replace(LORA, dropout=rate))) for rate in (0.0, 0.3))
    assert max(abs(a - b) for a, b in zip(plain.losses[1:], dropped.losses[1:], strict=True)) > 1e-6


def test_a_stage_without_anything_to_train_passes_gradients_on(ranks: Any) -> None:
    """First stage frozen as a whole, then the last one."""
    for layer in (3, 0):
        trial = replace(TRIAL, adapter=AdapterConfig(kind="lora", rank=2, targets=(f"layers.{layer}.*",)))
        layouts = {"pp=2": {"pp": 2}, "zbv": MORE["pp=2 zbv"]}
        assert max(worst(SPEC, trial, layouts, ranks).values()) < 1e-9


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_mixed_precision_rounds_the_same_numbers(kind: str, ranks: Any) -> None:
    """bf16 through FSDP2 against 16-bit weights by hand. Same rows in the same order: what differs is the order of two
    sums in fp32."""
    trial = replace(TRIAL, precision="bf16", global_batch=4, adapter=replace(LORA, kind=kind))
    plans = [trial_plan(trial, **fields) for fields in ({"dp": 2}, {"dp": 2, "zero": 3})]
    truth, records = ranks.run(trained_plain, 1, SPEC, trial)[0], ranks.run(trained, 2, SPEC, plans, trial)[0]
    for record in records:
        assert record.losses == pytest.approx(truth.losses, rel=1e-5)
        assert record.gradients.keys() == truth.gradients.keys()


def trained_plain(spec: ModelSpec, trial: Trial) -> Record:
    return train_plain(spec, trial)


def held_bytes(spec: ModelSpec, plan: Plan, trial: Trial) -> tuple[int, int, int]:
    """Bytes of this rank's parameters; how many elements the optimizer has states for; frozen parameters with a
    gradient."""
    engine = build_trial(spec, plan, trial, dist.get_rank(), CPU)
    optimizer = build_optimizer(trial.optimizer, engine.locals())
    batch, num_targets = trial_batch(spec, plan, trial, 1, engine.mesh.at.dp)
    norm, _ = accumulate(engine, batch, num_targets, Clock(CPU))
    with_gradient = sum(shard.gradient is not None for shard in engine.shards if not shard.local.requires_grad)
    update(engine, optimizer, norm, lr=1e-3, clip=1.0, clock=Clock(CPU))
    states = sum(state["exp_avg"].numel() for state in optimizer.state.values())
    return sum(shard.local.nbytes for shard in engine.shards), states, with_gradient


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_zero3_rank_holds_what_the_formula_says(kind: str, ranks: Any) -> None:
    sizes = {"num_layers": 2, "hidden": 256, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "ffn": 512, "vocab": 64}
    spec = preset("tiny").with_overrides(sizes)
    adapter = AdapterConfig(kind=kind, rank=8)
    trial = replace(TRIAL, precision="fp32", adapter=adapter, global_batch=4)
    plan = trial_plan(trial, dp=2, zero=3)
    predicted = predict_memory(spec, plan, "adamw", adapter)
    for held, states, with_gradient in ranks.run(held_bytes, 2, spec, plan, trial):
        assert held == pytest.approx(predicted["weights"], rel=0.001)
        assert 8 * states == pytest.approx(predicted["optimizer"], rel=0.001)
        assert with_gradient == 0
    if kind == "qlora":  # half a byte, the magnitudes, and a little for norms, ends and adapters
        linear = sum(out * inputs for out, inputs in linears_of(spec).values())
        packed = sum(packed_bytes(out, inputs) for out, inputs in linears_of(spec).values())
        assert packed / linear == pytest.approx(0.5 + 2 / 128 + 8 / 256, rel=0.1)
