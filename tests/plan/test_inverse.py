"""Questions the other way round against predicting everything: the fewest GPUs, the fastest that a budget buys, on
clusters small and large."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from shardwise.cluster.describe.read import read_cluster
from shardwise.plan.layouts.best_first import BestFirst
from shardwise.plan.layouts.candidate import Candidate
from shardwise.plan.layouts.inverse import Demand, cheapest, meeting
from shardwise.plan.layouts.search import explore
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction.predict import predict
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

CLUSTERS = (
    "1x1xh100",
    "1x8xh100",
    "3x4xl40s",
    "9x8xa100-80",
    "16x8xh100",
    "24x4xh100:nic=1GB/s",
    "40x8xh100",
    "2x72xgb200",
)
TRIES, MOST = 30, 3000


def compared(draw: random.Random) -> tuple[int, bool]:
    """One question at random, asked in three ways. Returns GPUs of the cluster, and whether the answer was neither
    `all` nor `none`."""
    hidden = draw.choice([1024, 4096])
    model = ModelSpec(
        num_layers=draw.randint(2, 12), hidden=hidden, num_heads=8, num_kv_heads=4, ffn=3 * hidden, vocab=32000
    )
    cluster = read_cluster(draw.choice(CLUSTERS))
    job = Job(draw.choice([1024, 4096]), draw.choice([48, 512, 1000]), tokens=10**10, price=2.0)
    fixed = {"train.micro_batch": 1, "memory.offload": "none", "memory.activation_offload": False, "parallel.cp": 1}
    fixed["memory.recompute"] = draw.choice(["none", "full"])
    fixed |= draw.choice([{"parallel.tp": 1, "parallel.zero": draw.choice([1, 3])}, {"parallel.pp": 1}])
    if "parallel.pp" not in fixed:
        fixed["parallel.virtual_stages"] = 1
    space = Space(model, cluster, job, fixed)
    every = [space.plan(*layout) for layout in space.on(space.finer_counts)]
    if not 0 < len(every) <= MOST:
        return 0, False
    predicted = [Candidate(plan, predict(model, cluster, job, plan)) for plan in every]
    limit = draw.choice(sorted(found.prediction.memory_bytes for found in predicted))
    fitting = [found for found in predicted if found.prediction.memory_bytes <= limit]
    engine = BestFirst(space, limit)

    fewest = min(found.plan.world for found in fitting)
    assert meeting(engine, Demand(job, cluster), True, 1)[0].plan.world == fewest

    steps = -(-job.tokens // job.tokens_per_step)
    within = steps * draw.choice(fitting).prediction.step_s * 1.0001
    in_time = [found for found in fitting if found.prediction.step_s * steps <= within]
    listed = meeting(engine, Demand(job, cluster, within=within), False, 3)
    assert [found.plan.world for found in listed] == sorted({found.plan.world for found in in_time})[:3]
    assert all(found.prediction.step_s * steps <= within for found in listed)

    def cost(found: Candidate) -> float:
        return steps * found.prediction.step_s / 3600 * found.plan.world * 2.0

    budget = cost(draw.choice(fitting)) * 1.0001
    affordable = [found for found in fitting if cost(found) <= budget]
    demand = Demand(job, cluster, budget=budget)
    bought = meeting(engine, demand, False, 1)[0]
    assert cost(bought) <= budget
    assert bought.prediction.step_s <= 1.05 * min(found.prediction.step_s for found in affordable)  # by effort
    least = min(map(cost, fitting))
    assert cost(cheapest(engine, demand)) <= 1.05 * least
    assert meeting(engine, replace(demand, budget=0.9 * least), False, 1) == []
    assert meeting(engine, Demand(job, cluster, within=1e-3), False, 1) == []
    return cluster.world, len({found.plan.world for found in in_time}) < len({found.plan.world for found in fitting})


def test_the_same_answers_as_predicting_everything():
    """On as many questions as are counted here: one that compares nothing would not."""
    sizes = [compared(random.Random(seed)) for seed in range(TRIES)]
    assert sum(gpus > 0 for gpus, _ in sizes) >= 0.8 * TRIES
    assert sum(gpus > 64 for gpus, _ in sizes) >= 0.4 * TRIES
    assert sum(tells for _, tells in sizes) >= 0.3 * TRIES


@pytest.mark.parametrize("model", ["llama3-8b", "llama3.2-1b"])
def test_a_larger_cluster_never_needs_more_gpus(model):
    """It has all GPUs of the smaller one."""
    job, spec = Job(8192, 128, tokens=10**11), preset(model)
    for within in (None, 200 * 86400.0):
        found = []
        for nodes in (1, 5, 9, 64):
            cluster = read_cluster(f"{nodes}x8xh100")
            engine = explore(spec, cluster, job, 1).engine
            assert engine is not None
            fewest = meeting(engine, Demand(job, cluster, within=within), True, 1)
            found.append(fewest[0].plan.world if fewest else 10**9)
        assert found == sorted(found, reverse=True), found
        assert found[-1] < 64 and (within or found == [1] * 4)


def test_numbers_of_gpus_of_a_larger_cluster_are_those_of_a_smaller_one_and_more():
    def counts(cluster: str, **fixed: int) -> set[int]:
        keys = {f"parallel.{axis}": degree for axis, degree in fixed.items()}
        return set(Space(preset("llama3-8b"), read_cluster(cluster), Job(8192, 128), keys).finer_counts)

    assert counts("1x8xh100") <= counts("9x8xh100") <= counts("64x8xh100") <= counts("2048x8xh100")
    assert counts("9x8xh100", dp=5) <= counts("64x8xh100", dp=5)
    most = sorted(counts("2048x8xh100"))
    assert len(most) < 200 and all(b - a <= 8 or b / a < 1.07 for a, b in pairwise(most))
