"""Each plan that the planner prints runs, and computes what one process computes.

Jobs and layouts are drawn from all that the planner considers on up to four CPU ranks, always the same ones. They are
executed as they are by the engine, on a small model of the kind that was planned for: the proof of `shardwise verify`,
limit 1e-9 in fp64.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import RankPool

from shardwise.cluster.describe.table import known_cluster
from shardwise.plan.layouts.search import explore
from shardwise.plan.layouts.space import Space
from shardwise.prove.verify import Proof, prove
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import OptimizerConfig

MODELS = {
    "dense": preset("tiny"),
    "tied, grouped heads, windows": preset("tiny").with_overrides(
        {"tied": True, "num_kv_heads": 2, "sliding_window": 48, "global_every": 2}
    ),
    "experts": preset("tiny-moe"),
}
CORES = known_cluster("cpu", 1, 4)
DEADLINE_S = 120.0  # of one layout on busy cores; a layout that hangs is named, with the stack of every rank
ALWAYS_THE_SAME = settings(
    max_examples=32,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def proof_of(spec: ModelSpec, plan: Plan) -> Proof:
    """Runs on a rank."""
    torch.set_num_threads(1)
    return prove(spec, plan, OptimizerConfig(), dist.get_rank(), torch.device("cpu"), steps=2)


def check(ranks: RankPool, name: str, plan: Plan) -> None:
    try:
        proof = ranks.run(proof_of, plan.world, MODELS[name], plan, timeout=DEADLINE_S)[0]
    except Exception as error:
        error.add_note(f"{name}: {plan.layout}, micro-batch {plan.micro_batch} of {plan.global_batch}")
        raise
    assert proof.holds, f"{plan.layout}: {proof}"


@st.composite
def jobs(draw: st.DrawFn) -> tuple[str, Job]:
    batch = draw(st.sampled_from([4, 6, 8]))
    return draw(st.sampled_from(sorted(MODELS))), Job(96, batch, precision=draw(st.sampled_from(["fp32", "bf16"])))


@given(jobs(), st.data())
@ALWAYS_THE_SAME
def test_any_layout_that_the_planner_considers_runs(ranks: RankPool, job: tuple[str, Job], data: st.DataObject) -> None:
    name, what = job
    space = Space(MODELS[name], CORES, what, {})
    gpus = data.draw(st.sampled_from([2, 3, 4]))
    grid = data.draw(st.sampled_from(list(space.grids(gpus))))
    pace = data.draw(st.sampled_from(list(space.paces(grid))))
    saving = data.draw(st.sampled_from(space.savings))
    check(ranks, name, space.plan(grid, pace, data.draw(st.sampled_from(space.states(grid))), saving))


@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_the_search_prints_runs(ranks: RankPool, name: str) -> None:
    """The best layout of every number of ranks, and the best of several families."""
    found = explore(MODELS[name], CORES, Job(96, 8, precision="fp32"), top=4)
    plans = [candidate.plan for candidate in (*found.candidates, *found.by_gpus.values())]
    assert plans
    for plan in dict.fromkeys(plan for plan in plans if plan.world > 1):
        check(ranks, name, plan)
