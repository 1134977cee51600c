"""The answers of the search: what is told beside the ranking, and what when nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.describe.read import read_cluster
from shardwise.errors import UserError
from shardwise.plan.layouts.candidate import rank_of
from shardwise.plan.layouts.pareto import measures, pareto
from shardwise.plan.layouts.search import explore, memory_limit, search
from shardwise.spec.cluster import HEADROOM, HOST_HEADROOM
from shardwise.spec.job import Job
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig

QLORA = AdapterConfig(kind="qlora")


@pytest.fixture(scope="module")
def result():
    return explore(preset("llama3-8b"), read_cluster("1x8xh100"), Job(8192, 32), 4)


def test_candidates_fit_and_come_fastest_first(result):
    ranks = [rank_of(c) for c in result.candidates]
    assert len(ranks) == 4 and ranks == sorted(ranks)
    assert all(c.prediction.memory_bytes <= result.limit for c in result.candidates)
    assert result.limit == int(HEADROOM * 80e9) or result.limit < 80e9


def test_one_layout_of_each_family(result):
    families = [(c.plan.dp, c.plan.tp, c.plan.cp, c.plan.pp, c.plan.zero) for c in result.candidates]
    assert len(set(families)) == len(families)


def test_the_best_per_number_of_gpus(result):
    assert set(result.by_gpus) <= set(range(1, 9))
    assert all(found.plan.world == gpus for gpus, found in result.by_gpus.items())
    assert result.by_gpus[8].prediction.step_s == result.candidates[0].prediction.step_s
    assert result.by_gpus[1].plan.offload != "none"  # 16 bytes per parameter are more than one card has


def test_nobody_in_the_pareto_set_is_beaten_in_everything(result):
    assert result.candidates[0] in result.pareto
    every = [measures(c) for c in [*result.pareto, *result.candidates, *result.by_gpus.values()]]
    for one in map(measures, result.pareto):
        assert not any(other != one and all(a <= b for a, b in zip(other, one, strict=True)) for other in every)
    assert pareto(result.pareto) == result.pareto


def test_every_value_that_the_winner_does_not_have_is_told_with_its_cost(result):
    winner = result.candidates[0]
    told = {region.what: region for region in result.regions}
    assert {"tp=2", "tp=8", "pp=2", "recompute=full", "micro_batch=1"} <= set(told) | {
        f"micro_batch={winner.plan.micro_batch}"
    }
    for region in result.regions:
        plan = region.candidate.plan
        assert str(getattr(plan, region.axis)) == region.value
        assert plan.world == winner.plan.world
        if region.slower is None:
            assert region.candidate.prediction.memory_bytes > result.limit
            assert " of " in region.reason  # 96 GiB of 80 GiB: activations 41 GiB
        else:
            assert region.slower >= 1.0
            assert region.reason.startswith("+")


def test_counts_add_up(result):
    counts = result.counts
    assert counts.considered > counts.evaluated > 0 and counts.too_slow >= 0 and counts.seconds > 0
    few = explore(preset("llama3-70b"), read_cluster("1xrtx4090"), Job(8192, 256, adapter=QLORA)).counts
    assert few.too_slow >= 0 < few.too_large, "nearly everything is too large"


def test_what_does_not_fit_is_told_with_the_closest_miss_and_what_would():
    job = Job(8192, 16, constraints={"memory.offload": "none"})
    result = explore(preset("llama3-70b"), read_cluster("1x8xh100"), job)
    assert result.candidates == [] and result.closest_miss is not None
    assert result.closest_miss.prediction.memory_bytes > result.limit
    told = {remedy.what: remedy for remedy in result.remedies}
    assert "without memory.offload=none" in told
    assert any(what.endswith("GPUs") for what in told)
    assert not told["adapter.kind=lora"].same_losses
    assert all(remedy.memory_bytes <= result.limit for remedy in result.remedies)


def test_constraints_that_exclude_each_other_are_named():
    job = Job(2048, 8, constraints={"parallel.dp": 4, "parallel.tp": 4, "memory.recompute": "full"})
    with pytest.raises(UserError, match=r"parallel\.dp=4 and parallel\.tp=4 exclude each other"):
        search(preset("llama3.2-1b"), read_cluster("1x8xh100"), job)
    with pytest.raises(UserError, match=r"parallel\.tp=5 leaves no layout"):
        search(preset("llama3.2-1b"), read_cluster("1x8xh100"), Job(2048, 8, constraints={"parallel.tp": 5}))


def test_a_limit_is_a_constraint():
    job = Job(2048, 8, constraints={"memory.limit": 10**10})
    assert memory_limit(read_cluster("1x8xh100"), job) == HEADROOM * 10**10
    assert all(
        c.prediction.memory_bytes <= HEADROOM * 10**10
        for c in search(preset("llama3.2-1b"), read_cluster("1x8xh100"), job)
    )


def test_what_is_offloaded_must_fit_into_cpu_memory():
    """70 B parameters are 16 bytes each in CPU memory: 282 GB for each of four cards. Of 256 GB, which are assumed, 205
    may be filled."""
    model, job, four = preset("llama3-70b"), Job(8192, 16), read_cluster("1x4xh100")
    assert search(model, four, job, 1) == []
    found = search(model, replace(four, host_memory=360 * 10**9), job, 1)[0]
    assert found.plan.offload != "none" and 256e9 < found.prediction.elsewhere["host"] <= HOST_HEADROOM * 360e9
