"""Ranks of small worlds do what the first of their class does, and nothing is found wrong with them."""

from __future__ import annotations

import pytest
from test_perform import job_for

from shardwise.rehearse.perform import perform
from shardwise.rehearse.rehearsal import rehearse, summary

ALL = {"dp": 2, "tp": 2, "sequence": True, "pp": 2, "split": (1, 1), "zero": 2, "replicate": 1}
LAYOUTS = {
    "uneven rows": ALL | {"global_batch": 5, "micro_batch": 1},
    "context": {"dp": 2, "cp": 2, "tp": 2, "zero": 3, "replicate": 1, "global_batch": 4},
    "hybrid": {"dp": 4, "zero": 3, "replicate": 2, "global_batch": 4, "micro_batch": 1},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_run_the_program_of_their_class_and_nothing_is_found_wrong(name):
    job = job_for(**LAYOUTS[name])
    found = rehearse(job, limit=2**33)
    assert found.faults == [] and found.holds
    classes, programs = found.classes, found.programs
    assert len(classes.first) < job.plan.world
    for rank in {int(rank) for number in range(len(programs)) for rank in classes.ranks(number)[1:][[0, -1]]}:
        mine, theirs = perform(job, rank), programs[classes.of_rank[rank]]
        assert list(mine.calls) == list(theirs.calls), rank
        assert list(mine.events) == list(theirs.events), rank
        assert mine.groups == theirs.groups, rank
        assert mine.peak <= theirs.peak * 1.001, rank
    told = summary(found)
    assert sum(one["ranks"] for one in told["classes"]) == job.plan.world
    assert {one["axis"] for one in told["calls"]} >= {"world", "shard"}
