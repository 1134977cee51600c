"""What a run measures as it starts reaches the planner's own prediction, whatever the machine did."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.cluster.measure.blocks import BlockTimes
from shardwise.plan.prediction.measured_rates import scaled_cluster
from shardwise.plan.prediction.step_time import step_seconds
from shardwise.run.block_times import block_times
from shardwise.run.measured_cluster import measured_cluster
from shardwise.spec.cluster import ClusterSpec, Link
from shardwise.spec.job import job_of
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import Config, OptimizerConfig

TINY, MOE = preset("tiny"), preset("tiny-moe")
CORES = this_cluster(Machine(2, 16 * 2**30, (), "linux"))
GPUS = this_cluster(Machine(8, 16 * 2**30, (Gpu("NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0)),) * 2, "linux"))


def plan(**changes) -> Plan:
    values = dict(
        device="cpu",
        precision="fp32",
        seq_len=128,
        global_batch=8,
        micro_batch=4,
        num_steps=1,
        threads_per_rank=1,
        reason="",
    )
    return Plan(**(values | changes))


def times_of(the_plan: Plan, spec=TINY, **changes) -> BlockTimes:
    alone = replace(the_plan, dp=1, replicate=1, zero=0, global_batch=the_plan.micro_batch)
    return replace(BlockTimes(spec, alone, 0.3, 0.01, spec.num_parameters), **changes)


@pytest.mark.parametrize("cluster", [CORES, GPUS], ids=["cores", "gpus"])
@pytest.mark.parametrize("model_s", [0.01, 0.05, 2.0])
def test_the_prediction_of_a_step_is_what_its_blocks_took(cluster: ClusterSpec, model_s: float):
    """One process, two micro-batches: twice the blocks, once the optimizer."""
    here = plan(device=cluster.device.kind, precision="bf16-true" if cluster is GPUS else "fp32")
    job = job_of(Config(), here)
    found = scaled_cluster(cluster, TINY, here, job, times_of(here, model_s=model_s, optimizer_s=0.02))
    parts = step_seconds(TINY, found, job, here)
    around = 0.002 if cluster is GPUS else 0.0  # of a step on a GPU
    assert parts["compute"] + parts.get("launch", 0.0) - around == pytest.approx(2 * model_s, rel=0.02)
    assert parts["optimizer"] == pytest.approx(0.02, rel=0.02)


def test_the_optimizer_takes_as_long_as_its_share_of_the_model():
    """Measured on an eighth of the elements; each of two ranks updates half of them."""
    here = plan(dp=2, zero=1, replicate=1, micro_batch=1)
    job, cluster = job_of(Config(), here), CORES
    times = times_of(here, elements=TINY.num_parameters // 8, optimizer_s=0.01)
    parts = step_seconds(TINY, scaled_cluster(cluster, TINY, here, job, times), job, here)
    assert parts["optimizer"] == pytest.approx(0.04, rel=0.02)


@pytest.mark.parametrize(
    ("spec", "changes", "expected"),
    [
        (TINY, dict(tp=2, sequence=True), dict(num_heads=TINY.num_heads // 2, ffn=TINY.ffn // 2)),
        (MOE, dict(dp=2, ep=2, micro_batch=2), dict(num_experts=MOE.num_experts // 2, expert_ffn=MOE.expert_ffn)),
    ],
)
def test_a_rank_times_its_own_slice(spec, changes, expected):
    small = replace(spec, vocab=64, max_seq_len=64)
    found = block_times(small, plan(seq_len=32, **changes), "auto", OptimizerConfig(), torch.device("cpu"))
    assert {name: getattr(found.spec, name) for name in expected} == expected
    assert found.model_s > 0 and found.optimizer_s and found.plan.world == 1


def test_context_parallel_ranks_time_their_tokens():
    found = block_times(TINY, plan(seq_len=64, cp=2, micro_batch=1), "auto", OptimizerConfig(), torch.device("cpu"))
    assert found.plan.seq_len == 32


def test_an_optimizer_that_is_elsewhere_is_not_timed():
    here = plan(seq_len=32, offload="optimizer")
    found = block_times(TINY, here, "auto", OptimizerConfig(), torch.device("cpu"))
    assert found.optimizer_s is None
    cluster = scaled_cluster(CORES, TINY, here, job_of(Config(), here), found)
    assert not cluster.device.curves


def test_this_machine_is_measured():
    here = plan(seq_len=32, micro_batch=2, global_batch=2)
    rates, times = measured_cluster(TINY, here, Config(), torch.device("cpu"), 2**20)
    assert times is not None and times.model_s > 0
    cluster = scaled_cluster(rates, TINY, here, job_of(Config(), here), times)
    assert cluster.world == 1 and 1e8 < cluster.device.flops["fp32"] < 1e13
    assert step_seconds(TINY, cluster, job_of(Config(), here), here)["compute"] > 0
    links = (Link("loopback", 2, 1e9), Link("nic", 4, 1e8))
    nodes = ClusterSpec("two nodes", 2, 2, rates.device, links)
    scaled = scaled_cluster(nodes, TINY, here, job_of(Config(), here), times)
    assert scaled.tiers == links and scaled.device == cluster.device, "one rank's blocks know no links"
