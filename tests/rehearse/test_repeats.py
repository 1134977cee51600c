"""What is repeated is what would have been run: the same calls, waits and FLOPs, and memory within 1.5 %."""

from __future__ import annotations

import pytest
from test_perform import job_for

from shardwise.rehearse.classes import families, rank_classes
from shardwise.rehearse.perform import perform, perform_alike
from shardwise.rehearse.program import Program

ZBV = {"pp": 4, "schedule": "zbv", "virtual_stages": 2, "split": (1,) * 8, "micro_batch": 1}
LAYOUTS = {
    "accumulation": {"dp": 2, "zero": 2, "replicate": 1, "global_batch": 12, "micro_batch": 1},
    "zbv": ZBV | {"dp": 2, "zero": 1, "replicate": 1, "global_batch": 14},
    "zero=3": {"pp": 2, "split": (1, 1), "dp": 2, "zero": 3, "replicate": 1, "global_batch": 12, "micro_batch": 1},
    "interleaved": {"pp": 2, "schedule": "interleaved", "virtual_stages": 2, "split": (1,) * 4, "tp": 2,
                    "sequence": True, "zero": 2, "dp": 2, "replicate": 1, "global_batch": 12, "micro_batch": 1},
}  # fmt: skip


def same(one: Program, other: Program) -> None:
    assert list(one.calls) == list(other.calls)
    assert list(one.events) == list(other.events)
    assert one.peak == pytest.approx(other.peak, rel=0.015), (one.memory, other.memory)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_with_repeats_is_the_step_without(name):
    job = job_for(**LAYOUTS[name])
    rank = job.plan.world - 1
    same(perform(job, rank), perform(job, rank, repeats=False))


def test_a_stage_in_the_middle_is_the_one_beside_it_with_another_list_of_actions():
    job = job_for(**(ZBV | {"global_batch": 7}))
    classes = rank_classes(job.spec, job.plan)
    assert [1, 2] in families(job.spec, job.plan, classes)
    _, moved = perform_alike(job, [1, 2])
    real = perform(job, 2, repeats=False)
    same(moved, real)
    assert moved.shards == real.shards and moved.channels == real.channels and moved.groups == real.groups
