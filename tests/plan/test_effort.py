"""What a technique must win before it comes first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.describe.read import read_cluster
from shardwise.plan.layouts.candidate import Candidate, rank_of
from shardwise.plan.layouts.effort import PER_CENT, effort, effort_of
from shardwise.plan.layouts.search import search
from shardwise.plan.prediction.predict import predict
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

PLAIN = Plan(
    device="cuda",
    precision="bf16",
    seq_len=4096,
    global_batch=16,
    micro_batch=1,
    num_steps=1,
    threads_per_rank=1,
    reason="",
    dp=8,
    zero=0,
)
MORE = [
    dict(offload="optimizer"),
    dict(offload="all"),
    dict(activation_offload=True),
    dict(zero=3, replicate=1),
    dict(tp=2),
    dict(cp=2),
    dict(pp=2, split=(2, 2)),
    dict(pp=2, split=(2, 2), schedule="zero-bubble"),
]


@pytest.mark.parametrize("more", MORE, ids=str)
def test_every_technique_has_its_price_and_prices_add_up(more):
    once = effort(replace(PLAIN, **more))
    both = effort(replace(PLAIN, **(more | {"cp": 2, "activation_offload": True})))
    assert effort(PLAIN) == 1 < once <= both
    assert effort_of(replace(PLAIN, **more), more.get("offload", "none"), more.get("activation_offload", False)) <= once


def test_a_layout_that_is_faster_by_less_than_its_price_comes_second():
    model, cluster, job = preset("llama3-8b"), read_cluster("8xh200"), Job(4096, 16)
    plain = Candidate(PLAIN, predict(model, cluster, job, PLAIN))
    share = PER_CENT["offload=optimizer"] / 100

    def offloaded(factor: float) -> Candidate:
        step = {"compute": factor * plain.prediction.step_s}
        return Candidate(replace(PLAIN, offload="optimizer"), replace(plain.prediction, step=step))

    assert rank_of(plain) < rank_of(offloaded(1 / (1 + share / 2)))
    assert rank_of(plain) > rank_of(offloaded(1 / (1 + 2 * share)))


def test_a_large_model_on_many_cards_is_planned_without_what_wins_less_than_its_price():
    found = search(preset("llama3-8b"), read_cluster("2x8xh100"), Job(8192, 256), 1)[0].plan
    assert found.offload == "none" and not found.activation_offload and found.cp == 1
