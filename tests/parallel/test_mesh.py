"""The grid of ranks and the groups along its lines: who stands where, who talks to whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.parallel.mesh import build_mesh
from shardwise.prove.reference import Trial
from shardwise.prove.trial import trial_plan
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

TRIAL = Trial(global_batch=8, micro_batch=1)
GROUPS = ("dp", "shard", "tp", "pp", "same_kv", "ends")


def make_plan(**degrees: Any) -> Plan:
    split = (1,) * (degrees.get("pp", 1) * degrees.get("virtual_stages", 1)) if degrees.get("pp", 1) > 1 else ()
    return trial_plan(TRIAL, split=split, **degrees)


def members(plan: Plan, num_kv_heads: int, tied: bool) -> dict[str, list[int] | None]:
    """The global ranks of each group, found by talking: every rank says its number into the group."""
    spec = preset("tiny").with_overrides({"num_heads": 4, "num_kv_heads": num_kv_heads, "tied": tied})
    mesh = build_mesh(plan, spec, dist.get_rank(), torch.device("cpu"), fsdp=plan.zero > 0)
    found: dict[str, list[int] | None] = {}
    for name in GROUPS:
        group = getattr(mesh, name)
        if group is None:
            found[name] = None
            continue
        present = torch.zeros(plan.world, dtype=torch.int64)
        present[dist.get_rank()] = 1
        dist.all_reduce(present, group=group)
        found[name] = present.nonzero().flatten().tolist()
    return found


def test_three_axes(ranks: Any) -> None:
    """Eight ranks: pipeline outermost, then data, then tensor parallelism."""
    plan = make_plan(dp=2, zero=1, tp=2, pp=2)
    found = ranks.run(members, 8, plan, 4, True)
    assert [(at.pp, at.dp, at.tp) for at in map(plan.coordinates, range(8))] == [
        (pp, dp, tp) for pp in range(2) for dp in range(2) for tp in range(2)
    ]
    assert [rank["tp"] for rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert [rank["dp"] for rank in found] == [[0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7]]
    assert [rank["shard"] for rank in found] == [rank["dp"] for rank in found]
    assert [rank["pp"] for rank in found] == [[rank % 4, rank % 4 + 4] for rank in range(8)]
    assert [rank["ends"] for rank in found] == [rank["pp"] for rank in found]
    assert all(rank["same_kv"] is None for rank in found)


def test_replicas_of_shards(ranks: Any) -> None:
    found = ranks.run(members, 4, make_plan(dp=4, zero=3, replicate=2), 4, False)
    assert [rank["shard"] for rank in found] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [rank["dp"] for rank in found] == [[0, 1, 2, 3]] * 4
    assert all(rank[name] is None for rank in found for name in ("tp", "pp", "ends", "same_kv"))


@pytest.mark.parametrize(("num_kv_heads", "neighbours"), [(4, None), (2, [[0, 1], [2, 3]]), (1, [[0, 1, 2, 3]])])
def test_ranks_with_the_same_keys_and_values(num_kv_heads: int, neighbours: list[list[int]] | None, ranks: Any) -> None:
    found = ranks.run(members, 4, make_plan(tp=4), num_kv_heads, False)
    wanted = [next((group for group in neighbours or () if rank in group), None) for rank in range(4)]
    assert [rank["same_kv"] for rank in found] == wanted


def test_ends_of_a_pipeline_only_where_a_tied_weight_has_two_homes(ranks: Any) -> None:
    tied = ranks.run(members, 3, make_plan(pp=3), 4, True)
    assert [rank["ends"] for rank in tied] == [[0, 2], None, [0, 2]]
    untied = ranks.run(members, 3, make_plan(pp=3), 4, False)
    assert [rank["ends"] for rank in untied] == [None] * 3
    vee = ranks.run(members, 2, make_plan(pp=2, schedule="zbv", virtual_stages=2), 4, True)
    assert [rank["ends"] for rank in vee] == [None] * 2  # first and last stage are on one rank


def test_every_rank_has_its_own_place() -> None:
    plan = make_plan(dp=4, zero=2, replicate=2, tp=2, pp=1)
    places = [plan.coordinates(rank) for rank in range(plan.world)]
    assert [plan.rank_at(place) for place in places] == list(range(plan.world))
    assert [place.dp for place in places] == [rank // 2 for rank in range(8)]
