"""What offloading leaves on a device, and what it puts elsewhere."""

from __future__ import annotations

import pytest

from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.plan.prediction.memory import predict_elsewhere, predict_memory
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


def test_a_disk_with_nothing_to_move_is_refused():
    with pytest.raises(UserError) as caught:
        load_config(None, ["memory.offload_to=nvme"])
    what, why, fix = str(caught.value).splitlines()
    assert what.startswith("error: `memory.offload_to = nvme` has nothing to move")
    assert why == "  why  memory.offload is auto"
    assert fix == "  fix  memory.offload=nvme"
    load_config(None, ["memory.offload=nvme"])
