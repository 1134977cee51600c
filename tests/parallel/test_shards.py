"""Cutting a tensor and putting it together again: every rank's part, every layout, sizes that do not divide."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initial_value
from shardwise.parallel.collect import collect
from shardwise.parallel.shards import gather, row_range, squared_norm, sum_tensors
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_plan
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

SPEC = preset("tiny").with_overrides(
    {"num_layers": 4, "hidden": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn": 45, "vocab": 61}
)
TRIAL = Trial(global_batch=8, micro_batch=1, precision="fp32")
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=3 zero=3": {"dp": 3, "zero": 3},  # 20 and 61 rows over three ranks
    "dp=4 zero=1": {"dp": 4, "zero": 1},
    "dp=4 zero=2 replicate=2": {"dp": 4, "zero": 2, "replicate": 2},
    "tp=2 sp": {"tp": 2, "sequence": True},  # 45 and 61 over two ranks
    "tp=4": {"tp": 4},  # two ranks share a key-value head
    "dp=2 zero=3 tp=2": {"dp": 2, "zero": 3, "tp": 2},
    "dp=2 zero=1 pp=2": {"dp": 2, "zero": 1, "pp": 2, "split": (3, 1)},
    "pp=2 zbv": {"pp": 2, "schedule": "zbv", "virtual_stages": 2, "split": (1, 1, 1, 1)},
}


def look(plan: Plan) -> dict[str, Any]:
    """After weights were put: what this rank has, what `take` cuts, what `gather` and `collect` put together."""
    engine = build_trial(SPEC, plan, TRIAL, dist.get_rank(), torch.device("cpu"))
    full = {s.name: initial_value(SPEC, s.name, full_shapes()[s.name], TRIAL.seed) for s in engine.shards}
    return {
        "local is taken": [torch.equal(s.local, s.take(full[s.name])) for s in engine.shards],
        "gathered is full": [torch.equal(gather(s, s.local, engine.mesh), full[s.name]) for s in engine.shards],
        "collected": collect(engine, lambda shard: {f"{shard.name}/x": shard.local.detach() * 2}),
        "numel / replicas": sum(shard.local.numel() / shard.replicas for shard in engine.shards),
        "shares memory": all(shares_memory(shard.local, shard.parameter) for shard in engine.shards),
    }


@cache
def full_shapes() -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Decoder(SPEC).named_parameters()}


def shares_memory(local: Tensor, parameter: Any) -> bool:
    plain = getattr(parameter, "_local_tensor", parameter)
    return plain.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_take_put_gather_and_collect_belong_together(layout: str, ranks: Any) -> None:
    plan = trial_plan(TRIAL, **LAYOUTS[layout])
    found = ranks.run(look, plan.world, plan)
    for rank in found:
        assert all(rank["local is taken"]) and rank["local is taken"]
        assert all(rank["gathered is full"]) and rank["shares memory"]
    names = [name.removesuffix("/x") for name in found[0]["collected"]]
    assert set(names) == set(full_shapes()) and not any(rank["collected"] for rank in found[1:])
    for name, value in found[0]["collected"].items():
        name = name.removesuffix("/x")
        assert torch.equal(value, 2 * initial_value(SPEC, name, full_shapes()[name], TRIAL.seed)), name
    assert sum(rank["numel / replicas"] for rank in found) == pytest.approx(SPEC.num_parameters, rel=1e-12)


@pytest.mark.parametrize(("rows", "parts"), [(7, 3), (61, 4), (2, 4), (8, 2), (1, 1)])
def test_rows_of_all_parts_are_all_rows(rows: int, parts: int) -> None:
    ranges = [row_range(rows, parts, index) for index in range(parts)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    sizes = [stop - start for start, stop in ranges]
    assert sizes == [len(chunk) for chunk in torch.arange(rows).chunk(parts)] + [0] * (
        parts - len(torch.arange(rows).chunk(parts))
    )


# Sums ----------------------------------------------------------------------------------------------------------------


def sum_some(bucket_bytes: int) -> tuple[list[Tensor], int]:
    rank = dist.get_rank()
    tensors = [torch.full((5,), float(rank + 1)), torch.arange(6.0).view(2, 3).t(), torch.ones(3, dtype=torch.float64)]
    sent = sum_tensors(tensors, dist.group.WORLD, bucket_bytes)
    return tensors, sent


@pytest.mark.parametrize("bucket_bytes", [1, 24, 2**20])
def test_sums_do_not_depend_on_buckets(bucket_bytes: int, ranks: Any) -> None:
    for tensors, sent in ranks.run(sum_some, 3, bucket_bytes):
        assert torch.equal(tensors[0], torch.full((5,), 6.0))
        assert torch.equal(tensors[1], 3 * torch.arange(6.0).view(2, 3).t())
        assert torch.equal(tensors[2], torch.full((3,), 3.0, dtype=torch.float64))
        assert sent == 4 * 5 + 4 * 6 + 8 * 3


def test_nothing_to_sum_is_no_message() -> None:
    assert sum_tensors([], None, 1) == 0
    assert float(squared_norm([])) == 0.0
