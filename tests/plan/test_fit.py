"""What would make a job fit: only what really does, only what the schema offers, the cheapest first."""

from __future__ import annotations

import pytest

from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.config.keys import all_keys
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.plan.layouts.remedies import Remedy
from shardwise.plan.resolve.fit import needed_memory, rank_memory_limit, ways_to_fit
from shardwise.plan.resolve.refusal import Asked
from shardwise.plan.resolve.resolve import resolve
from shardwise.plan.resolve.usual import plan_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

TINY = preset("tiny")
CPU = Machine(2, 16 * 2**30, (), "linux")
GPUS = Machine(64, 512 * 2**30, (Gpu("H100", 80 * 2**30, (9, 0)),) * 8, "linux")

KEPT = ["memory.recompute=none", "memory.offload=none"]  # the planner would help itself
ONE = [f"parallel.{axis}=1" for axis in ("dp", "tp", "pp", "cp", "ep")]
JOBS: list[tuple[ModelSpec, Machine, list[str]]] = [
    (TINY, CPU, ["parallel.dp=2", "parallel.zero=0", "train.micro_batch=4", "memory.limit=465MiB", *KEPT]),
    (TINY, CPU, ["parallel.dp=2", "parallel.zero=0", "train.micro_batch=4", "memory.limit=420MiB", *KEPT]),
    (TINY, CPU, [*ONE, "train.seq_len=8192", "train.global_batch=1", "memory.limit=1300MiB", *KEPT]),
    (TINY, CPU, ["parallel.layout=pp=2", "train.micro_batch=4", "train.seq_len=1024", "memory.limit=500MiB", *KEPT]),
    (
        preset("llama3-8b"),
        GPUS,
        [*ONE, "train.seq_len=4096", "train.micro_batch=1", "train.global_batch=8", *KEPT],
    ),
    (
        preset("llama3-8b"),
        GPUS,
        ["parallel.dp=8", "parallel.zero=0", "train.seq_len=2048", "train.global_batch=64", *KEPT],
    ),
]


def ways(spec: ModelSpec, machine: Machine, words: list[str]) -> list[Remedy]:
    asked = Asked(load_config(None, words).config, spec, machine, None)
    return ways_to_fit(asked, plan_of(asked, 1000), lambda other: plan_of(other, 1000))


@pytest.mark.parametrize(("spec", "machine", "words"), JOBS)
def test_every_way_works_when_it_is_typed(spec: ModelSpec, machine: Machine, words: list[str]) -> None:
    with pytest.raises(UserError):
        resolve(load_config(None, words).config, spec, machine, None, 1000)
    found = ways(spec, machine, words)
    assert 2 <= len(found) <= 3
    for way in found:
        # A later word wins over an earlier one, as on the command line.
        loaded = load_config(None, [*words, *way.what.split()])
        plan = resolve(loaded.config, spec, machine, None, 1000).plan
        offered = plan_of(Asked(loaded.config, spec, machine, None), 1000)
        assert needed_memory(spec, offered, loaded.config) == way.memory_bytes
        # What is left open the planner may fill otherwise, such as the schedule; that fits as well.
        assert needed_memory(spec, plan, loaded.config) <= rank_memory_limit(loaded.config, machine, plan)


@pytest.mark.parametrize(("spec", "machine", "words"), JOBS)
def test_the_cheapest_comes_first_and_what_changes_the_losses_last(
    spec: ModelSpec, machine: Machine, words: list[str]
) -> None:
    found = ways(spec, machine, words)
    order = [(not way.same_losses, len(way.change) > 2, way.slower) for way in found]
    assert order == sorted(order)


def test_a_job_that_takes_more_than_predicted_needs_a_larger_change() -> None:
    spec, machine, words = JOBS[0]
    asked = Asked(load_config(None, words).config, spec, machine, None)
    plan = plan_of(asked, 1000)
    mild = ways_to_fit(asked, plan, lambda other: plan_of(other, 1000))
    strong = ways_to_fit(asked, plan, lambda other: plan_of(other, 1000), scale=1.1, without=("memory.precision",))
    assert mild[0].change == {"train.micro_batch": 1}
    assert strong and all(
        len(way.change) > 1 and "memory.precision" not in way.change for way in strong if way.same_losses
    )


def test_only_what_the_schema_offers_is_proposed() -> None:
    for job in JOBS:
        for way in ways(*job):
            for name, value in way.change.items():
                key = all_keys()[name]
                assert not key.later and (key.available is None or value in key.available)
