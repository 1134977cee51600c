"""LoRA and QLoRA in every layout train what one process trains: losses, norms, gradients and trained parameters, in fp64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.config.schema import AdapterConfig
from shardwise.model.presets import preset
from shardwise.model.spec import ModelSpec
from shardwise.plan.plan import Plan
from shardwise.plan.split import even_split
from shardwise.run.reference import Record, Trial, train_plain
from shardwise.run.trial import train_in_layout, trial_plan
from shardwise.run.verify import compare

CPU = torch.device("cpu")
SMALL = {"num_layers": 4, "hidden": 40, "num_heads": 4, "num_kv_heads": 2, "head_dim": 12, "ffn": 150, "vocab": 53}
SPEC = preset("tiny").with_overrides(SMALL)
LORA = AdapterConfig(kind="lora", rank=3, alpha=6.0, targets=("q", "v", "o", "gate", "down"), train_also=("*norm",))
TRIAL = Trial(global_batch=5, micro_batch=1, seq_len=12, adapter=LORA)
LAYOUTS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_every_layout_trains_the_same_adapters(kind: str, ranks: Any) -> None:
    trial = replace(TRIAL, adapter=replace(LORA, kind=kind))
    for name, difference in worst(SPEC, trial, LAYOUTS | MORE, ranks).items():
        assert difference < 1e-9, f"{kind} {name}: {difference}"
