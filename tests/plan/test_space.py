"""Which layouts the planner considers: all of them run, and constraints hold."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice

import pytest

from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.cluster.describe.read import read_cluster
from shardwise.config.load import load_config
from shardwise.plan.layouts.gpu_counts import divisors
from shardwise.plan.layouts.parts import Saving, never_faster
from shardwise.plan.layouts.space import Space
from shardwise.plan.resolve.refusal import Asked
from shardwise.plan.resolve.usual import plan_of
from shardwise.spec.job import Job
from shardwise.spec.presets import preset

MODELS = ["llama3.2-1b", "gpt2", "smollm2-135m", "mixtral-8x7b", "deepseek-v3", "gemma2-2b"]


def some_plans(space: Space, count: int):
    """At random, over all numbers of GPUs."""
    draw = random.Random(0)
    grids = [grid for grid in space.some_grids()]
    for _ in range(count):
        grid = draw.choice(grids)
        states, saving = draw.choice(space.states(grid)), draw.choice(space.savings)
        if space.go_together(grid, states, saving.offload, saving.activation_offload):
            yield space.plan(grid, draw.choice(list(space.paces(grid))), states, saving)


@pytest.mark.parametrize("name", MODELS)
def test_the_runtime_plans_every_layout_just_so(name):
    """Typed as config keys, a layout of the space passes the config's rules and comes out of the runtime's own planning
    as it went in."""
    spec, cluster = preset(name), read_cluster("2x8xh100")
    machine = Machine(64, 2**40, (Gpu("H100", 80 * 2**30, (9, 0)),) * cluster.world, "linux")
    space = Space(spec, cluster, Job(1024, 24), {})
    for plan in some_plans(space, 60):
        words = {
            "train.seq_len": plan.seq_len,
            "train.global_batch": plan.global_batch,
            "train.micro_batch": plan.micro_batch,
            "train.steps": 1,
            "parallel.dp": plan.dp,
            "parallel.zero": plan.zero,
            "parallel.tp": plan.tp,
            "parallel.sequence": str(plan.sequence).lower(),
            "parallel.cp": plan.cp,
            "parallel.cp_kind": plan.cp_kind,
            "parallel.pp": plan.pp,
            "parallel.schedule": plan.schedule,
            "parallel.virtual_stages": plan.virtual_stages,
            "parallel.ep": plan.ep,
            "memory.precision": plan.precision,
            "memory.recompute": plan.recompute,
            "memory.offload": plan.offload,
            "memory.activation_offload": str(plan.activation_offload).lower(),
        }
        if plan.zero:
            words["parallel.replicate"] = plan.replicate
        config = load_config(None, [f"{key}={value}" for key, value in words.items()]).config
        made = plan_of(Asked(config, spec, machine, None), 100)
        assert replace(made, reason="", threads_per_rank=1) == replace(plan, reason="", threads_per_rank=1)


def test_a_constraint_holds_in_every_layout():
    fixed = {"parallel.tp": 2, "memory.recompute": "every-3", "parallel.zero": 2, "train.micro_batch": 3}
    space = Space(preset("llama3.2-1b"), read_cluster("1x8xh100"), Job(2048, 24), fixed)
    plans = list(some_plans(space, 50))
    assert plans
    assert {(p.tp, p.recompute, p.zero, p.micro_batch) for p in plans} == {(2, "every-3", 2, 3)}


def test_degrees_that_no_power_of_two_holds_are_found_when_they_are_asked_for():
    space = Space(preset("llama3.2-1b"), read_cluster("8x8xh100"), Job(2048, 60), {"parallel.dp": 5})
    assert {grid.gpus for grid in space.some_grids()} >= {5, 10, 20, 40, 60}


def test_a_model_that_transformers_builds_is_only_replicated_or_sharded():
    from shardwise.interop.transformers.spec import TransformersSpec

    fields = {key: value for key, value in preset("gpt2").to_dict().items()}
    spec = TransformersSpec(**fields)
    grids = list(Space(spec, read_cluster("1x4xh100"), Job(1024, 8), {}).some_grids())
    assert {(g.tp, g.cp, g.pp, g.ep) for g in grids} == {(1, 1, 1, 1)}


def test_nothing_is_shared_by_one_rank_and_sequences_are_cut_where_rows_are_not_enough():
    space = Space(preset("llama3.2-1b"), read_cluster("1x4xh100"), Job(8192, 4), {})
    for grid in space.some_grids():
        if grid.dp * grid.cp == 1:
            assert [states.zero for states in space.states(grid)] == [0]
        if grid.cp > 1:
            assert all(size % 2 for size in space.sizes(grid))


def test_savings_are_ordered_by_what_they_do():
    savings = Space(preset("llama3.2-1b"), read_cluster("1x4xh100"), Job(2048, 8), {}).savings
    plain = Saving("none", "none", False)
    assert savings[0] == plain
    assert all(never_faster(saving, than=plain) for saving in savings)
    assert never_faster(Saving("full", "none", False), than=Saving("every-4", "none", False))
    assert never_faster(Saving("every-2", "all", False), than=Saving("every-4", "none", False))
    assert not never_faster(Saving("full", "none", True), than=Saving("none", "none", True))  # there is less to move
    assert not never_faster(Saving("selective", "none", False), than=Saving("every-4", "none", False))
    assert not never_faster(Saving("every-3", "none", False), than=Saving("every-4", "none", False))
    for first, second in ((a, b) for i, a in enumerate(savings) for b in islice(savings, i)):
        assert not never_faster(second, than=first), (first, second)


def test_divisors():
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)
