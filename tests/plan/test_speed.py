"""[speed]: what is asked for outright is done or refused, by a run as by the search; `auto` gives way to the layout."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardwise.cluster.describe.machine import Machine
from shardwise.config.load import load_config
from shardwise.errors import UserError
from shardwise.plan.answer.question import ask
from shardwise.plan.layouts.search import explore
from shardwise.plan.resolve.resolve import resolve
from shardwise.plan.resolve.speed import with_speed
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import SpeedConfig

CPU = Machine(cores=4, memory_bytes=2**36, gpus=(), platform="linux")
PIPELINE = ("parallel.layout=pp=2", "train.global_batch=16")


def plan_of(*words: str) -> Plan:
    loaded = load_config(None, words)
    return resolve(loaded.config, preset("tiny"), CPU, None, 1000, loaded.origins).plan


@pytest.mark.parametrize(
    ("schedule", "word", "instead"),
    [
        ("zero-bubble", "speed.compile=blocks", "parallel.schedule=1f1b"),
        ("gpipe", "speed.loss=fused", "parallel.schedule=1f1b"),
    ],
)
def test_what_a_schedule_cannot_have_is_refused_and_the_fix_works(schedule, word, instead):
    words = (*PIPELINE, f"parallel.schedule={schedule}")
    with pytest.raises(UserError) as caught:
        plan_of(*words, word)
    assert len(str(caught.value).splitlines()) == 3 and instead in caught.value.fix
    plan_of(*words, f"{word.partition('=')[0]}=auto")
    plan_of(*PIPELINE, instead, word)


def test_auto_gives_way():
    found = [plan_of(*PIPELINE, f"parallel.schedule={name}") for name in ("zero-bubble", "gpipe", "1f1b")]
    assert [plan.loss for plan in found] == ["fused", "recompute", "fused"]
    assert {plan.compile for plan in found} == {"none"}, "a CPU compiles nothing by itself"


def test_norms_have_a_kernel_in_compiled_blocks_on_gpus():
    assert plan_of().kernels == plan_of("speed.kernels=torch").kernels == "torch"
    with pytest.raises(UserError, match=r"speed\.kernels = own.* is for compiled blocks on a GPU"):
        plan_of("speed.kernels=own")
    assert {(plan.kernels, plan.tp == plan.cp == 1) for plan in search()} == {("own", True), ("torch", False)}
    assert {(plan.kernels, plan.tp, plan.cp) for plan in search("speed.kernels=own")} == {("own", 1, 1)}
    assert {plan.kernels for plan in search("speed.kernels=torch")} == {"torch"}
    assert {plan.kernels for plan in search("speed.compile=none")} == {"torch"}
    assert {plan.kernels for plan in search("memory.precision=fp8")} == {"torch"}
    assert {plan.kernels for plan in search("parallel.tp=2")} == {"torch"}
    gpu = replace(plan_of(), device="cuda", precision="bf16")
    own, layer, post = SpeedConfig(kernels="own"), {"norm": "layer"}, {"post_norms": True}
    wide = preset("tiny").with_overrides({"hidden": 512})
    assert with_speed(gpu, own, wide).kernels == "own"
    for plan, spec in (
        (replace(gpu, precision="fp8"), wide),
        (replace(gpu, precision="fp32"), wide),
        (replace(gpu, tp=2), wide),
        *((gpu, wide.with_overrides(changes)) for changes in (layer, post, {"hidden": 256}, {"hidden": 32768})),
    ):
        assert with_speed(plan, SpeedConfig(), spec).kernels == "torch"
        with pytest.raises(UserError, match=r"speed\.kernels = own.* is for norms of 512") as caught:
            with_speed(plan, own, spec)
        assert plan.precision in str(caught.value) and len(str(caught.value).splitlines()) == 3
    for words in (("parallel.pp=2", "parallel.schedule=zbv"), ("parallel.tp=2",), ("memory.precision=fp8",)):
        with pytest.raises(UserError, match=r"speed\.kernels"):
            search(*words, "speed.kernels=own")


def test_products_are_measured_in_compiled_blocks_on_gpus():
    assert plan_of().products == "library"
    with pytest.raises(UserError) as caught:
        plan_of("speed.products=measured")
    assert len(str(caught.value).splitlines()) == 3 and "on cpu" in str(caught.value)
    assert (
        {plan.products for plan in search()}
        == {plan.products for plan in search("speed.products=measured")}
        == {"measured"}
    )
    assert {plan.products for plan in search("speed.products=library")} == {"library"}
    assert {plan.products for plan in search("speed.compile=none")} == {"library"}
    split = ("parallel.pp=2", "parallel.schedule=zbv")
    with pytest.raises(UserError, match=r"speed\.products"):
        search(*split, "speed.products=measured")


def search(*words: str) -> list[Plan]:
    question = ask("llama3.2-1b", "4xh100", seq="2k", batch="64k", words=words)
    return [found.plan for found in explore(question.spec, question.cluster, question.job, 5).candidates]


def test_a_search_is_bound_by_it():
    assert {plan.compile for plan in search()} == {"blocks"}
    assert {plan.compile for plan in search("speed.compile=none")} == {"none"}
    split = ("parallel.pp=2", "parallel.schedule=zbv")
    assert {plan.compile for plan in search(*split)} == {"none"}, "a split backward needs plain blocks"
    with pytest.raises(UserError, match=r"speed\.compile"):
        search(*split, "speed.compile=blocks")
    assert {(plan.world, plan.copies) for plan in search("speed.copies=true")} == {(1, True)}


def test_flash4_is_priced_where_it_is_asked_for_and_can_run():
    usual, other = search(), search("model.attention=flash4")
    assert {plan.attention for plan in usual} == {"sdpa"} and {plan.attention for plan in other} == {"flash4"}
    with pytest.raises(UserError, match="capability") as caught:
        ask("llama3.2-1b", "4xa100-80", seq="2k", batch="64k", words=("model.attention=flash4",))
    assert len(str(caught.value).splitlines()) == 3 and "model.attention=auto" in caught.value.fix
    question = ask("llama3.2-1b", "4xh100", seq="32k", batch="128k")
    before, after = (
        explore(one.spec, one.cluster, one.job, 1).candidates[0].prediction.step_s
        for one in (question, question.constrained(["model.attention=flash4"]))
    )
    assert 0.86 < after / before < 0.97


@pytest.mark.parametrize(
    ("layout", "asked", "attention"),
    [
        ({}, "sdpa", "sdpa"),
        ({}, "measured", "flash4"),
        ({}, "flash4", "flash4"),
        ({"cp": 2}, "measured", "sdpa"),
        ({"cp": 2}, "flash4", "sdpa"),
        ({"cp": 2, "cp_kind": "ulysses"}, "measured", "sdpa"),
        ({"cp": 2, "cp_kind": "ulysses"}, "flash4", "flash4"),
    ],
)
def test_a_ring_has_its_own_attention_and_cut_sequences_are_not_measured(layout, asked, attention):
    here = Plan(
        device="cuda",
        precision="bf16",
        seq_len=2048,
        global_batch=4,
        micro_batch=1,
        num_steps=1,
        threads_per_rank=1,
        reason="",
        **layout,
    )
    assert with_speed(here, SpeedConfig(), preset("llama3.2-1b"), asked).attention == attention


@pytest.mark.parametrize("model", ["gemma2-2b", "deepseek-v3"])
def test_soft_caps_and_latent_heads_have_no_flash4(model):
    here = Plan(
        device="cuda",
        precision="bf16",
        seq_len=2048,
        global_batch=4,
        micro_batch=1,
        num_steps=1,
        threads_per_rank=1,
        reason="",
    )
    assert with_speed(here, SpeedConfig(), preset(model), "flash4").attention == "sdpa"


def test_plain_blocks_are_predicted_to_be_slower():
    times = []
    for words in ((), ("speed.compile=none",)):
        question = ask("llama3.2-1b", "4xh100", seq="2k", batch="64k", words=words)
        times.append(explore(question.spec, question.cluster, question.job, 1).candidates[0].prediction.step_s)
    assert times[0] < times[1]
