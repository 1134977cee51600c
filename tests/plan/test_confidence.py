"""Intervals and what was never measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.describe.table import known_cluster
from shardwise.plan.prediction.predict import interval, kind_of_job, outside, predict, table
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

MODEL = preset("llama3-8b")
PLAN = Plan(
    device="cuda",
    precision="bf16",
    seq_len=8192,
    global_batch=16,
    micro_batch=1,
    num_steps=1,
    threads_per_rank=1,
    reason="a test",
    dp=8,
    zero=3,
    recompute="full",
)


def test_every_kind_of_job_has_an_interval():
    jobs = [(MODEL, nodes, "bf16", step) for nodes in (1, 16, 17) for step in (1e-9, 1e9)]
    jobs += [(MODEL, 1, "fp8", 1.0), (preset("deepseek-v3"), 1, "bf16", 1.0)]
    cluster = known_cluster("h100", 32, 8)  # nodes that a layout leaves idle do not make it less certain
    kinds = [
        kind_of_job(model, cluster, replace(PLAN, precision=precision, dp=8 * nodes, global_batch=8 * nodes), step)
        for model, nodes, precision, step in jobs
    ]
    where = ["one node", "few nodes", "many nodes"]
    assert kinds == [f"{place}{word}" for place in where for word in ("", ", waiting")] + ["fp8", "experts"]
    assert set(kinds) == set(table()["step"])
    for about in table()["step"].values():
        assert 0 < about["p10"] < about["p90"] and about["rows"] >= 10


def test_a_step_that_waits_is_less_certain():
    for place in ("one node", "few nodes", "many nodes"):
        busy, waiting = table()["step"][place], table()["step"][f"{place}, waiting"]
        assert waiting["p90"] / waiting["p10"] > busy["p90"] / busy["p10"]


def test_a_prediction_has_its_interval():
    cluster = known_cluster("h100", 1, 8)
    found = predict(MODEL, cluster, Job(8192, 16), PLAN)
    low, high = interval(MODEL, cluster, PLAN, found.step_s)
    assert (found.low, found.high) == pytest.approx((found.step_s * low, found.step_s * high))
    assert found.outside == ()


def test_what_was_never_measured_is_named():
    far = replace(PLAN, seq_len=2**21, offload="all", dp=8 * 4096, global_batch=8 * 4096)
    said = outside(MODEL, known_cluster("l40s", 4096, 8), far)
    assert said[0] == "l40s: no run on it"
    assert "offload all to cpu: no run with it" in said
    assert [word.split()[0] for word in said[1:4]] == ["nodes", "devices", "sequence"]


def test_rates_measured_here_speak_for_themselves():
    strange = known_cluster("l40s", 1, 8)
    assert outside(MODEL, strange, PLAN) == ("l40s: no run on it",)
    assert outside(MODEL, replace(strange, origins={"achievable": "measured"}), PLAN) == ()
