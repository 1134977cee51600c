"""What offloading leaves on a device, and what it puts elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.cluster.describe.read import read_cluster
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.plan.layouts.search import search
from shardwise.plan.prediction.memory import predict_elsewhere, predict_memory
from shardwise.plan.resolve.resolve import resolve
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

SPEC = preset("tiny").with_overrides({"num_layers": 20, "vocab": 256})
WEIGHTS = 4 * SPEC.num_parameters


def plan(device: str = "cpu", **fields: object) -> Plan:
    values = {"precision": "fp32", "seq_len": 128, "global_batch": 4, "micro_batch": 4, "num_steps": 1}
    return Plan(device=device, threads_per_rank=1, reason="", **(values | fields))  # type: ignore[arg-type]


def test_on_a_cpu_only_a_disk_takes_anything_away():
    none, optimizer = (predict_memory(SPEC, plan(offload=way), "adamw") for way in ("none", "optimizer"))
    assert optimizer == none
    nvme = plan(offload="optimizer", offload_to="nvme", offload_buffer=2**20)
    assert predict_memory(SPEC, nvme, "adamw") == none | {"optimizer": 2**20}
    assert predict_elsewhere(SPEC, nvme, "adamw") == {"host": 0, "disk": 2 * WEIGHTS}
    assert predict_elsewhere(SPEC, plan(), "adamw") == {"host": 0, "disk": 0}


def test_on_a_gpu_state_leaves_for_the_host():
    here = plan("cuda", offload="optimizer")
    memory = predict_memory(SPEC, here, "adamw")
    assert memory["optimizer"] == 0
    assert memory["weights"] == WEIGHTS
    assert 0 < memory["gradients"] < WEIGHTS / 5, "each leaves as soon as it is complete"
    assert predict_elsewhere(SPEC, here, "adamw")["host"] == 4 * WEIGHTS
    accumulating = plan("cuda", offload="optimizer", micro_batch=2)
    assert predict_memory(SPEC, accumulating, "adamw")["gradients"] == WEIGHTS


def test_with_all_of_it_away_two_blocks_are_left():
    memory = predict_memory(SPEC, plan("cuda", offload="all"), "adamw")
    assert memory["weights"] == memory["optimizer"] == 0
    assert memory["gathered"] + memory["gradients"] < WEIGHTS / 4


def test_on_a_disk_the_start_of_a_run_needs_the_most():
    here = plan(offload="all", offload_to="nvme", offload_buffer=2**20)
    memory = predict_memory(SPEC, here, "adamw")
    assert sum(memory.values()) - memory["process"] >= WEIGHTS
    assert predict_elsewhere(SPEC, here, "adamw")["disk"] == 4 * WEIGHTS


def test_activations_that_leave_a_gpu_are_counted_in_cpu_memory():
    """All of a micro-batch, every micro-batch in flight of a pipeline, and what powers of two take more than was asked
    for."""
    bf16 = {"precision": "bf16", "recompute": "full"}
    here = plan("cuda", **bf16)
    away = predict_elsewhere(SPEC, replace(here, activation_offload=True), "adamw")
    inputs = SPEC.num_layers * 4 * 128 * SPEC.hidden * 2
    assert inputs <= away["host"] < 2 * inputs
    assert predict_elsewhere(SPEC, here, "adamw")["host"] == 0
    pipeline = plan("cuda", **bf16, micro_batch=1, pp=2, split=(10, 10), activation_offload=True)
    one = predict_elsewhere(SPEC, replace(pipeline, global_batch=1), "adamw")["host"]
    assert predict_elsewhere(SPEC, pipeline, "adamw")["host"] == 2 * one, "the first stage has two in flight"
    states = replace(here, offload="optimizer")
    both = predict_elsewhere(SPEC, replace(states, activation_offload=True), "adamw")
    assert both["host"] == away["host"] + predict_elsewhere(SPEC, states, "adamw")["host"]


def test_pinned_memory_comes_in_powers_of_two():
    odd = preset("tiny").with_overrides({"hidden": 384, "num_heads": 6, "num_kv_heads": 6, "num_layers": 20})
    for spec, factor in ((SPEC, 1.0), (odd, 4 / 3)):
        away = plan("cuda", precision="bf16", recompute="full", activation_offload=True)
        kept = spec.num_layers * 4 * 128 * spec.hidden * 2
        expected = factor if spec is odd else (1 << (spec.hidden - 1).bit_length()) / spec.hidden
        assert predict_elsewhere(spec, away, "adamw")["host"] == pytest.approx(expected * kept)


def test_what_bloom_176b_is_advised_fits_its_hosts():
    """On 48 nodes of 8 A100. Without counting activations there, 3.3 TB were put on each node of 2.6 TB."""
    sizes = {"hidden": 14336, "num_layers": 70, "num_heads": 112, "num_kv_heads": 112, "ffn": 57344, "vocab": 250880}
    bloom, cluster = (
        replace(preset("gpt3-175b"), name="bloom-176b", **sizes),
        read_cluster("48x8xa100-80:cpu_memory=2600GB"),
    )
    found = search(bloom, cluster, Job(2048, 2048), 2)
    assert found and any(one.plan.activation_offload for one in found), "or it shows nothing"
    for one in found:
        assert one.prediction.elsewhere["host"] <= cluster.host_room(one.plan.world)


def test_a_run_whose_activations_do_not_fit_the_host_is_refused():
    gpu = Gpu("NVIDIA H200", 150 * 10**9, (9, 0))
    config = load_config(
        None, ["memory.activation_offload=true", "memory.recompute=none", "train.micro_batch=8"]
    ).config
    config = replace(config, train=replace(config.train, seq_len=4096))
    for memory, is_refused in ((2**40, False), (2**31, True)):
        machine = Machine(8, memory, (gpu,), "linux")
        try:
            resolve(config, preset("smollm2-1.7b"), machine, None, 1000)
        except UserError as error:
            assert is_refused and "CPU memory" in str(error) and "memory.recompute=full" in str(error)
        else:
            assert not is_refused


def test_a_disk_with_nothing_to_move_is_refused():
    with pytest.raises(UserError) as caught:
        load_config(None, ["memory.offload_to=nvme"])
    what, why, fix = str(caught.value).splitlines()
    assert what.startswith("error: `memory.offload_to = nvme` has nothing to move")
    assert why == "  why  memory.offload is auto"
    assert fix == "  fix  memory.offload=nvme"
    load_config(None, ["memory.offload=nvme"])
