"""What is open is the planner's, what is set is a constraint, and config.toml says why."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.config.load import load_config
from shardwise.config.reopen import planner_origins, reopen
from shardwise.config.write import resolved_text
from shardwise.errors import UserError
from shardwise.plan.layouts.search import search
from shardwise.plan.resolve.fit import needed_memory
from shardwise.plan.resolve.resolve import Resolved, resolve
from shardwise.spec.cluster import HEADROOM
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

TINY, LARGE = preset("tiny"), preset("llama3-8b")
CPU = Machine(2, 16 * 2**30, (), "linux")
LONG = ("train.seq_len=4096", "train.global_batch=64")


def gpus(count: int, gigabytes: int = 1024) -> Machine:
    return Machine(64, gigabytes * 2**30, (Gpu("NVIDIA H100 80GB HBM3", 80 * 2**30, (9, 0)),) * count, "linux")


def resolved(*words: str, spec: ModelSpec = TINY, on: Machine = CPU, nproc: int | None = None) -> Resolved:
    loaded = load_config(None, words)
    return resolve(loaded.config, spec, on, nproc, 1000, loaded.origins)


def plan_of(*words: str, **where) -> Plan:
    return resolved(*words, **where).plan


# What costs time only where it is needed ------------------------------------------------------------------------------


def test_what_fits_computes_nothing_again():
    plan = plan_of()
    assert (plan.recompute, plan.offload, plan.zero) == ("none", "none", 0)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputation_comes_when_nothing_else_fits(mode):
    """One rank, one sequence: only computing again makes it smaller."""
    words = [
        "parallel.dp=1",
        "parallel.tp=1",
        "parallel.pp=1",
        "parallel.cp=1",
        "train.global_batch=1",
        "train.seq_len=2048",
    ]
    plan = plan_of(*words, f"memory.recompute={mode}")
    limit = int(needed_memory(TINY, plan, load_config(None, words).config) / HEADROOM) + 2
    found = resolved(*words, f"memory.limit={limit}")
    assert found.plan.recompute == mode
    assert found.plan.reason.endswith(f"recompute={mode} because it does not fit without")
    assert found.chosen["memory.recompute"] == "it does not fit without"
    with pytest.raises(UserError):
        plan_of(*words, f"memory.limit={limit}", "memory.recompute=none")


def test_on_a_cpu_nothing_is_offloaded_by_itself():
    with pytest.raises(UserError) as caught:
        plan_of("memory.limit=100MiB")
    assert "offload" not in caught.value.what


def test_one_gpu_keeps_states_in_cpu_memory_when_they_do_not_fit():
    plan = plan_of(*LONG, spec=LARGE, on=gpus(1))
    assert plan.offload != "none" and ("does not fit" in plan.reason or "faster" in plan.reason)
    with pytest.raises(UserError):  # a machine whose own memory is as small
        plan_of(*LONG, spec=LARGE, on=gpus(1, gigabytes=64))


# Other layouts --------------------------------------------------------------------------------------------------------


def test_a_sequence_too_long_for_one_rank_is_shared_by_several():
    words = ("train.seq_len=8192", "train.global_batch=1", "memory.limit=1300MiB", "memory.recompute=none")
    found = resolved(*words)
    assert found.plan.world == 2 and found.plan.dp == 1
    assert "does not fit" in found.plan.reason and "does not fit" in found.chosen["parallel.dp"]


def test_a_faster_layout_on_several_gpus_says_how_much():
    found = resolved("train.seq_len=131072", "train.global_batch=8", spec=LARGE, on=gpus(8))
    assert found.plan.cp > 1 and "% faster than dp=8" in found.plan.reason
    assert found.chosen["parallel.cp"].startswith("faster than dp=8")


@pytest.mark.parametrize(("name", "length", "batch"), [("llama3-8b", 131072, 8), ("mixtral-8x7b", 4096, 16)])
def test_a_run_that_leaves_the_usual_layout_has_the_one_that_plan_tells(name, length, batch):
    """One planner: the same layouts, prices and limits, whoever asks."""
    spec, machine = preset(name), gpus(8)
    plan = plan_of(f"train.seq_len={length}", f"train.global_batch={batch}", spec=spec, on=machine)
    best = search(spec, this_cluster(machine), Job(length, batch, constraints={"memory.activation_offload": False}))[0]
    assert "faster" in plan.reason
    assert plan.layout == best.plan.layout


@pytest.mark.parametrize("words", [(), ("memory.limit=40GiB",)])
def test_what_plan_ranks_on_this_machine_a_run_takes(words):
    """The same limits of device and CPU memory, whoever asks: 210 GiB beside one card are filled by neither."""
    spec, machine = preset("llama3-8b"), replace(gpus(1), memory_bytes=210 * 2**30)
    limits = {"memory.limit": 40 * 2**30} if words else {}
    found = search(spec, this_cluster(machine), Job(8192, 8, constraints=limits), 8)
    assert found
    for one in found:
        layout = config_words(one.plan)
        plan = plan_of("train.seq_len=8192", "train.global_batch=8", *layout, *words, spec=spec, on=machine)
        assert plan.layout == one.plan.layout


def config_words(plan):
    names = {"parallel": ("dp", "zero", "tp", "cp", "pp"), "memory": ("recompute", "offload", "activation_offload")}
    return [f"{section}.{key}={getattr(plan, key)}".lower() for section, keys in names.items() for key in keys]


def test_fewer_gpus_where_messages_cost_more_than_they_bring():
    """Cards that talk through CPU memory."""
    cards = (Gpu("NVIDIA GeForce RTX 4090", 24 * 2**30, (8, 9), 0),) * 8
    slow = Machine(64, 256 * 2**30, cards, "linux")
    words = ("train.seq_len=1024", "train.global_batch=8")
    found = resolved(*words, spec=preset("gpt2-medium"), on=slow)
    assert found.plan.world < 8 and f"{found.plan.world} of 8 GPUs" in found.plan.reason
    assert plan_of(*words, spec=preset("gpt2-medium"), on=slow, nproc=8).world == 8  # as many as were started
    assert plan_of(*words, "parallel.dp=8", spec=preset("gpt2-medium"), on=slow).dp == 8


DEGREES = st.sampled_from([1, 2, 4])


@given(st.fixed_dictionaries({}, optional={
    "parallel.tp": DEGREES, "parallel.pp": DEGREES, "parallel.cp": DEGREES, "parallel.zero": st.integers(0, 3),
    "memory.recompute": st.sampled_from(["none", "selective", "full"]), "train.micro_batch": st.sampled_from([1, 2]),
}))  # fmt: skip
@settings(max_examples=25, derandomize=True)
def test_what_is_set_is_never_changed(asked):
    words = [f"{name}={value}" for name, value in asked.items()]
    try:
        found = resolved(*LONG, *words, spec=preset("qwen3-0.6b"), on=gpus(8))
    except UserError:
        return
    for name, value in asked.items():
        section, _, key = name.partition(".")
        assert getattr(found.plan, key) == value, (words, found.plan.layout)
        assert getattr(getattr(found.config, section), key) == value and name not in found.chosen
    assert found.plan.world <= 8


# config.toml ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("spec", "on", "words"), [(TINY, CPU, ()), (LARGE, gpus(8), LONG), (LARGE, gpus(1), LONG)])
def test_every_choice_has_a_reason_and_a_resumed_run_keeps_it(spec, on, words, tmp_path):
    loaded = load_config(None, words)
    found = resolve(loaded.config, spec, on, None, 1000, loaded.origins)
    path = tmp_path / "config.toml"
    path.write_text(resolved_text(found.config, loaded.origins | planner_origins(found.chosen)))
    assert all(f"# planner: {why}" in path.read_text() and why for why in found.chosen.values())
    again = reopen(path, [])
    kept = resolve(again.config, spec, on, None, 1000, again.origins)
    assert kept.plan.layout == found.plan.layout
    assert again.origins["parallel.dp"] == f"planner: {found.chosen['parallel.dp']}"


def test_another_layout_chooses_recomputation_anew(tmp_path):
    words = [
        "parallel.dp=1",
        "parallel.tp=1",
        "parallel.pp=1",
        "train.global_batch=2",
        "train.seq_len=2048",
        "memory.limit=500MiB",
    ]
    loaded = load_config(None, words)
    found = resolve(loaded.config, TINY, CPU, None, 1000, loaded.origins)
    assert found.plan.recompute != "none"
    path = tmp_path / "config.toml"
    path.write_text(resolved_text(found.config, loaded.origins | planner_origins(found.chosen)))
    roomy = reopen(path, ["memory.limit=2GiB"])
    assert resolve(roomy.config, TINY, CPU, None, 1000, roomy.origins).plan.recompute == "none"


def test_small_machines_are_planned_at_once():
    """The best of a few: others use the cores too, and the garbage of all tests is collected now and then."""
    took = []
    for _ in range(5):
        began = time.process_time()
        resolved()
        took.append(time.process_time() - began)
    assert min(took) < 0.3
