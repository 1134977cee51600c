"""A plan's arithmetic: the grid of ranks, the rows of a batch, the layout string, plan.json."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.config.load import load_config
from shardwise.spec.plan import Coordinates, Plan


def plan(**changes) -> Plan:
    values = dict(device="cpu", precision="fp32", seq_len=128, global_batch=8, micro_batch=1, num_steps=1,
                  threads_per_rank=1, reason="")  # fmt: skip
    return Plan(**(values | changes))


GRIDS = [
    {"dp": 4},
    {"dp": 4, "zero": 3},
    {"dp": 4, "zero": 2, "replicate": 2},
    {"dp": 4, "tp": 2},
    {"dp": 4, "zero": 1, "replicate": 2, "tp": 2, "pp": 3, "split": (2, 2, 2)},
    {"dp": 1, "tp": 4, "pp": 2, "schedule": "zbv", "virtual_stages": 2, "split": (2, 2, 1, 1)},
]


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: plan(**grid).layout)
def test_every_rank_has_its_own_place(grid):
    here = plan(**grid)
    places = [here.coordinates(rank) for rank in range(here.world)]
    assert len(set(places)) == here.world == here.dp * here.tp * here.pp
    assert [here.rank_at(place) for place in places] == list(range(here.world))
    assert {place.dp for place in places} == set(range(here.dp))
    assert here.replicate * here.shard == here.dp


def test_tensor_parallel_ranks_are_neighbours_and_the_pipeline_is_outermost():
    here = plan(dp=4, zero=1, replicate=2, tp=2, pp=2, split=(3, 3))
    along = {
        "tp": [here.rank_at(Coordinates(0, 0, 0, 0, tp)) for tp in range(2)],
        "shard": [here.rank_at(Coordinates(0, 0, shard, 0, 0)) for shard in range(2)],
        "replicate": [here.rank_at(Coordinates(0, replicate, 0, 0, 0)) for replicate in range(2)],
        "pp": [here.rank_at(Coordinates(pp, 0, 0, 0, 0)) for pp in range(2)],
    }
    assert along == {"tp": [0, 1], "shard": [0, 2], "replicate": [0, 4], "pp": [0, 8]}
    assert here.coordinates(6) == Coordinates(pp=0, replicate=1, shard=1, cp=0, tp=0)
    assert here.coordinates(6).dp == 3


def test_without_zero_every_data_parallel_rank_is_a_replica():
    assert (plan(dp=4).replicate, plan(dp=4).shard) == (4, 1)
    assert (plan(dp=4, zero=1).replicate, plan(dp=4, zero=1).shard) == (1, 4)
    with pytest.raises(AssertionError):
        plan(dp=4, zero=0, replicate=2)
    with pytest.raises(AssertionError):
        plan(dp=4, zero=3, replicate=3)


@given(st.integers(1, 60), st.integers(1, 12), st.integers(1, 60))
def test_rows_are_shared_once_and_as_evenly_as_possible(global_batch, dp, micro_batch):
    dp = min(dp, global_batch)
    here = plan(global_batch=global_batch, dp=dp, micro_batch=min(micro_batch, -(-global_batch // dp)))
    shares = [here.rows(index) for index in range(dp)]
    assert [row for share in shares for row in share] == list(range(global_batch))
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert sizes[0] == here.rows_per_rank
    needed = [-(-size // here.micro_batch) for size in sizes]
    assert max(needed) == here.num_microbatches


def test_the_batch_in_words_adds_up():
    one = plan(dp=2, zero=0, global_batch=8, micro_batch=2, seq_len=128)
    assert one.batch_in_words == "8 sequences x 128 tokens = 2 micro x 2 accumulated x 2 ranks"
    odd = plan(dp=2, zero=0, global_batch=8, micro_batch=3, seq_len=128)
    assert odd.batch_in_words.endswith("in 3 micro x 2 accumulated x 2 ranks: 12 places, 4 empty, without loss")


def test_a_batch_smaller_than_dp_is_no_plan():
    with pytest.raises(AssertionError):
        plan(dp=4, global_batch=3)
    with pytest.raises(AssertionError):
        plan(dp=4, global_batch=9, micro_batch=4)  # the largest share is three
    assert plan(dp=4, global_batch=9, micro_batch=3).num_microbatches == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"pp": 2},  # no split
        {"pp": 2, "split": (6,)},
        {"pp": 2, "split": (6, 0)},
        {"split": (6,)},  # no pipeline
        {"virtual_stages": 2},
        {"sequence": True},
    ],
    ids=str,
)
def test_what_contradicts_itself_is_no_plan(changes):
    with pytest.raises(AssertionError):
        plan(**changes)


def test_stages_own_consecutive_layers():
    here = plan(pp=2, virtual_stages=2, schedule="interleaved", split=(1, 2, 3, 4))
    assert here.num_stages == 4
    assert [layer for stage in range(4) for layer in here.layers_of(stage)] == list(range(10))
    assert here.layers_of(2) == range(3, 6)


@pytest.mark.parametrize(
    ("changes", "layout"),
    [
        ({}, "dp=1"),
        ({"dp": 2}, "dp=2"),
        ({"dp": 4, "zero": 3}, "dp=4 zero=3"),
        ({"dp": 4, "zero": 3, "replicate": 2}, "dp=4 zero=3 replicate=2"),
        ({"dp": 4, "zero": 3, "replicate": 4}, "dp=4 zero=3 replicate=4"),
        ({"tp": 4, "sequence": True}, "dp=1 tp=4 sp"),
        ({"dp": 2, "zero": 3, "tp": 4, "sequence": True, "pp": 2, "split": (3, 3)},
         "dp=2 zero=3 tp=4 sp pp=2 schedule=1f1b"),
        ({"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "split": (2, 2, 1, 1)},
         "dp=1 pp=2 schedule=interleaved virtual_stages=2"),
        ({"pp": 2, "schedule": "zbv", "virtual_stages": 2, "split": (2, 2, 1, 1)}, "dp=1 pp=2 schedule=zbv"),
        ({"pp": 2, "split": (4, 2)}, "dp=1 pp=2 schedule=1f1b split=4,2"),
    ],
)  # fmt: skip
def test_the_layout_string_says_what_does_not_go_without_saying_and_reads_back(changes, layout):
    here = plan(**changes)
    assert here.layout == layout
    parallel = load_config(None, [f"parallel.layout={layout}", "train.seq_len=128"]).config.parallel
    for name in ("dp", "tp", "pp", "zero", "replicate"):
        if getattr(parallel, name) != "auto":
            assert getattr(parallel, name) == getattr(here, name), name
    assert parallel.sequence == ("auto" if not here.sequence else True)
    assert parallel.schedule == here.schedule
    assert parallel.split in ("auto", here.split)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: plan(**grid).layout)
def test_plan_json_reads_back_equal(grid):
    here = plan(**grid)
    stored = json.loads(json.dumps(here.to_dict()))
    assert stored["layout"] == here.layout
    assert Plan.from_dict(stored) == here
    assert Plan.from_dict({**stored, "prediction": {"memory_bytes": 1}}) == here


def test_a_plan_json_from_before_layouts_reads_back():
    old = dict(schema=1, layout="dp=2", device="cpu", precision="fp32", seq_len=128, global_batch=8, micro_batch=4,
               num_steps=340, threads_per_rank=1, reason="one replica per core, 2 in all", dp=2, zero=0)  # fmt: skip
    here = Plan.from_dict(old)
    assert (here.world, here.replicate, here.tp, here.pp, here.split) == (2, 2, 1, 1, ())


def test_a_plan_json_from_before_flash4_reads_back():
    here = plan(attention="flash4").to_dict()
    assert Plan.from_dict(here).attention == "flash4"
    del here["attention"]
    assert Plan.from_dict(here) == plan()


def test_another_zero_stage_of_the_same_plan():
    """Whoever changes zero says replicate too: without it the replicas of stage 0 stay replicas."""
    here = plan(dp=4)
    assert replace(here, zero=3, replicate=1).shard == 4
    assert replace(here, zero=3).shard == 1
