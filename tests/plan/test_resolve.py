"""From a config to a plan: what the planner fills in, what it refuses, and what the run's config.toml then says."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.config.load import load_config
from shardwise.config.write import write_config
from shardwise.errors import Exit, UserError
from shardwise.plan.prediction.lifetimes import PROCESS_BYTES
from shardwise.plan.prediction.memory import predict_memory
from shardwise.plan.resolve.fit import rank_memory_limit
from shardwise.plan.resolve.resolve import Resolved, resolve
from shardwise.plan.resolve.usual import micro_batch_sizes
from shardwise.spec.cluster import HEADROOM
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import ParallelConfig

TINY = preset("tiny")


def machine(cores: int = 2, gigabytes: float = 16, gpus: int = 0) -> Machine:
    return Machine(cores, int(gigabytes * 2**30), (Gpu("H100", 80 * 2**30, (9, 0)),) * gpus, "linux")


def resolved(*words: str, spec: ModelSpec = TINY, on: Machine | None = None, nproc: int | None = None) -> Resolved:
    loaded = load_config(None, words)
    return resolve(loaded.config, spec, on or machine(), nproc, 1000, loaded.origins)


def plan_of(*words: str, **where) -> Plan:
    return resolved(*words, **where).plan


def refusal(*words: str, **where) -> UserError:
    with pytest.raises(UserError) as caught:
        resolved(*words, **where)
    assert len(str(caught.value).splitlines()) == 3
    return caught.value


# Filling --------------------------------------------------------------------------------------------------------------


def test_the_default_run_is_what_it_always_was():
    plan = plan_of()
    assert plan == Plan(
        device="cpu",
        precision="fp32",
        seq_len=128,
        global_batch=8,
        micro_batch=4,
        num_steps=340,
        threads_per_rank=1,
        reason="one replica per core, 2 in all",
        dp=2,
        zero=0,
        replicate=2,
    )
    assert plan.layout == "dp=2"


@pytest.mark.parametrize(
    ("words", "on", "threads"),
    [
        ([], machine(cores=3), 1),
        (["parallel.dp=1"], machine(cores=8), 8),
        (["parallel.layout=dp=1 tp=2 pp=2"], machine(cores=8), 2),
        (["parallel.layout=dp=1 tp=2 pp=2"], machine(cores=2), 1),
        (["parallel.dp=1"], machine(cores=64, gpus=8), 4),
    ],
)
def test_cores_are_shared_by_all_ranks(words, on, threads):
    assert plan_of(*words, on=on).threads_per_rank == threads


def test_a_layout_reaches_the_plan():
    words = ["parallel.layout=dp=2 zero=3 tp=2 sp pp=2 schedule=interleaved virtual_stages=3"]
    plan = plan_of(*words, nproc=8)
    assert plan.layout == "dp=2 zero=3 tp=2 sp pp=2 schedule=interleaved virtual_stages=3"
    assert (plan.world, plan.replicate, plan.shard, plan.split) == (8, 1, 2, (1,) * 6)


def test_a_batch_that_does_not_divide_is_shared_unevenly():
    plan = plan_of("train.global_batch=7", "train.micro_batch=2", nproc=3)
    assert [len(plan.rows(index)) for index in range(3)] == [3, 2, 2]
    assert plan.num_microbatches == 2


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "bf16-true"])
def test_every_precision_of_this_version_is_planned(precision):
    assert plan_of(f"memory.precision={precision}").precision == precision


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        (["parallel.dp=1", "train.global_batch=12"], [12, 6, 4, 3, 2, 1]),
        (["parallel.dp=5", "train.global_batch=12"], [3, 1]),
        (["parallel.pp=2", "parallel.dp=1", "train.global_batch=64"], [8, 4, 2, 1]),  # 8 micro-batches at least
        (["parallel.pp=2", "parallel.dp=1", "train.global_batch=12"], [1]),
    ],
)
def test_a_pipeline_gets_enough_micro_batches(words, sizes):
    assert micro_batch_sizes(plan_of(*words)) == sizes
    assert plan_of(*words).micro_batch == sizes[0]


def test_steps_to_trace_are_steps_of_the_run():
    assert resolved("run.profile=10:12", "train.steps=12").config.run.profile == "10:12"
    problem = refusal("run.profile=10:13", "train.steps=12")
    assert problem.why == "this run has 12 steps" and problem.fix == "run.profile=9:12"
    assert refusal("run.profile=3:30", "train.steps=12").fix == "run.profile=1:12"


# ZeRO by memory -------------------------------------------------------------------------------------------------------


def needed(zero: int, spec: ModelSpec = TINY, dp: int = 4, **changes) -> int:
    """Predicted bytes per rank at one sequence per micro-batch, two of them."""
    values = dict(
        device="cpu",
        precision="fp32",
        seq_len=128,
        global_batch=8,
        micro_batch=1,
        num_steps=1,
        threads_per_rank=1,
        reason="",
        dp=dp,
        zero=zero,
    )
    return sum(predict_memory(spec, Plan(**(values | changes)), "adamw").values())


def limit_for(zero: int) -> list[str]:
    return ["train.micro_batch=1", f"memory.limit={int(needed(zero) / HEADROOM) + 2}"]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_zero_is_the_smallest_stage_that_fits(zero):
    """fp32 over four ranks, gradients accumulate: 16 P, 4 P + 4 P + 4 P, 4 P + 4 P, 4 P + two blocks."""
    plan = plan_of(*limit_for(zero), nproc=4)
    assert plan.zero == zero
    assert plan.shard == (1 if zero == 0 else 4)
    assert plan.reason == ("as asked" if zero == 0 else f"as asked; zero={zero} is the smallest stage that fits")
    assert needed(3) < needed(2) < needed(1) < needed(0)


def test_stage_1_where_it_is_enough():
    """One micro-batch: gradients do not accumulate, so stages 1 and 2 hold the same."""
    words = ["train.global_batch=4", f"memory.limit={int(needed(1, global_batch=4) / HEADROOM) + 2}"]
    assert needed(1, global_batch=4) == needed(2, global_batch=4)
    assert plan_of(*words, nproc=4).zero == 1


@pytest.mark.parametrize(
    ("words", "nproc", "zero", "replicate"),
    [
        ([], 1, 0, 1),
        ([], 4, 0, 4),
        (["parallel.tp=4"], 4, 0, 1),  # one replica: nobody to share with
        (["parallel.zero=3"], 4, 3, 1),
        (["parallel.zero=3"], 1, 3, 1),  # as asked, though there is nobody to share with
        (["parallel.zero=2", "parallel.replicate=2"], 4, 2, 2),
        (["parallel.replicate=2"], 4, 1, 2),  # two shards of each replica: that is ZeRO
        (["parallel.replicate=4"], 4, 0, 4),
        (["parallel.zero=0", "parallel.replicate=4"], 4, 0, 4),
    ],
)
def test_zero_and_replicas_go_together(words, nproc, zero, replicate):
    plan = plan_of(*words, nproc=nproc)
    assert (plan.zero, plan.replicate) == (zero, replicate)


def test_the_micro_batch_shrinks_before_the_stage_rises():
    room = needed(0, dp=1, micro_batch=2) / HEADROOM
    plan = plan_of("parallel.dp=1", f"memory.limit={int(room) + 2}")
    assert (plan.zero, plan.micro_batch) == (0, 2)


def test_ranks_of_one_machine_share_its_memory():
    plan = plan_of("parallel.layout=dp=2 tp=2")
    assert rank_memory_limit(load_config(None).config, machine(gigabytes=16), plan) == 4 * 2**30


# Refusals -------------------------------------------------------------------------------------------------------------


def test_a_micro_batch_larger_than_a_share_is_refused_and_both_fixes_work():
    words = ["parallel.dp=3", "train.global_batch=7", "train.micro_batch=4"]
    error = refusal(*words)
    assert error.what == "train.micro_batch = 4 is larger than a rank's share of the batch"
    assert "leaves 3 sequences per rank" in error.why
    assert error.fix == "train.micro_batch=3 or train.global_batch=12"
    assert error.where == "command line"
    for fix in error.fix.split(" or "):
        plan_of(*words, fix)


def test_the_same_for_a_batch_in_tokens():
    words = ["parallel.dp=2", "train.global_batch_tokens=512", "train.micro_batch=3"]
    error = refusal(*words)
    assert error.fix == "train.micro_batch=2 or train.global_batch_tokens=768"
    for fix in error.fix.split(" or "):
        plan_of(*words, fix)


def test_a_model_that_does_not_fit_is_refused_with_what_would_fit():
    """Three changes where there are three; which ones and in which order is tests/plan/test_fit.py's."""
    base = ["parallel.dp=4", "parallel.zero=0", "train.micro_batch=2", "train.global_batch=16", "memory.recompute=none"]
    first = {
        needed(0, global_batch=16): "train.micro_batch=1",
        needed(2, global_batch=16, micro_batch=2): "parallel.zero=2",
        needed(2, global_batch=16): "train.micro_batch=1 parallel.zero=2",
        needed(3, global_batch=16): "train.micro_batch=1 parallel.zero=3",
    }
    for limit, fix in first.items():
        error = refusal(*base, f"memory.limit={limit}")
        assert error.code == Exit.OUT_OF_MEMORY
        assert error.what.startswith("tiny does not fit: ") and error.what.endswith(" over")
        assert "dp=4 with micro-batch 2 holds weights" in error.why and "the largest part is layer 0" in error.why
        ways = [way.partition(" (") for way in error.fix.split(" or ")]
        assert fix in [words for words, *_ in ways]
        for words, _, cost in ways:
            assert re.fullmatch(r"[\d.]+ MiB, [+-]\d+ % step time\)", cost)
            plan_of(*base, f"memory.limit={limit}", *words.split())


def test_nothing_fits_nowhere():
    error = refusal(f"memory.limit={PROCESS_BYTES['cpu']}")
    assert error.fix == (
        "a smaller model.preset or train.seq_len, or more ranks to split it over (parallel.tp, parallel.pp, "
        "parallel.cp)"
    )


def test_more_ranks_are_no_advice_where_they_share_the_memory():
    error = refusal("model.preset=llama3-70b", spec=preset("llama3-70b"))
    assert "`shardwise plan llama3-70b --cluster 8xh100`" in error.fix and "more ranks" not in error.fix


def test_a_sequence_that_one_rank_cannot_hold_fits_when_ranks_share_it():
    words = (
        "train.seq_len=8192",
        "train.global_batch=1",
        "memory.limit=1300MiB",
        "parallel.dp=1",
        "memory.recompute=none",
    )
    error = refusal(*words, *(f"parallel.{axis}=1" for axis in ("tp", "cp", "pp")))
    assert error.code == Exit.OUT_OF_MEMORY and error.what.startswith("tiny does not fit: ")
    plan = plan_of(*words, "parallel.cp=2")
    assert (plan.cp, plan.dp, plan.zero, plan.seq_len) == (2, 1, 0, 8192)
    tighter = [word.replace("1300", "1210") for word in words]  # then the states are shared too, over the same ranks
    assert plan_of(*tighter, "parallel.cp=2").zero == 1


def test_8_billion_parameters_on_8_gpus_need_their_states_sharded():
    plan = plan_of(
        "memory.precision=bf16",
        "train.global_batch=64",
        "train.seq_len=4096",
        "train.micro_batch=1",
        spec=preset("llama3-8b"),
        on=machine(64, 512, gpus=8),
    )
    assert plan.zero > 0 and plan.world == 8


def test_fp64_stays_on_the_cpu():
    error = refusal("memory.precision=fp64", on=machine(gpus=1))
    assert error.fix == "memory.precision=fp32"
    plan_of(error.fix, on=machine(gpus=1))


def test_learned_positions_end_somewhere():
    error = refusal("train.seq_len=2048", spec=preset("gpt2"))
    assert error.fix == "train.seq_len=1024"
    plan_of(error.fix, spec=preset("gpt2"))


@pytest.mark.parametrize(
    ("words", "gpus", "said"),
    [
        (("parallel.pp=2", "parallel.dp=2", "parallel.zero=1"), 0, "with zero=1"),
        (("parallel.pp=2", "memory.precision=bf16"), 0, "with memory.precision=bf16"),
        (("parallel.pp=2",), 2, "on GPUs"),
    ],
)
def test_idle_slots_that_cannot_be_filled(words, gpus, said):
    def plan(word: str) -> Plan:
        return resolved(f"parallel.fill_bubbles={word}", *words, on=machine(gpus=gpus)).plan

    with pytest.raises(UserError) as caught:
        plan("eval")
    assert caught.value.what == f"`parallel.fill_bubbles = eval` is not available yet {said}"
    assert caught.value.fix == "parallel.fill_bubbles=none"
    assert plan("none").pp == 2


def test_idle_slots_that_can_be_filled():
    assert (
        resolved("parallel.fill_bubbles=eval", "parallel.layout=dp=2 tp=2 pp=2").config.parallel.fill_bubbles == "eval"
    )


# What config.toml says afterwards -------------------------------------------------------------------------------------


def test_the_filled_config_keeps_every_axis():
    """Whoever resumes gets the layout back out of this config."""
    words = ["parallel.layout=dp=2 cp=2 ep=2", "model.preset=tiny-moe"]
    config = resolved(*words, spec=preset("tiny-moe"), on=machine(cores=4)).config
    assert (config.parallel.dp, config.parallel.cp, config.parallel.ep) == (2, 2, 2)


def test_the_filled_config_shows_what_runs():
    result = resolved("parallel.tp=2", "parallel.layout=pp=2 schedule=zbv", nproc=8)
    parallel = result.config.parallel
    shown = {field.name: getattr(parallel, field.name) for field in fields(ParallelConfig)}
    assert shown == {
        "dp": 2,
        "zero": 0,
        "replicate": "auto",
        "tp": 2,
        "sequence": True,
        "cp": 1,
        "cp_kind": "ring",
        "pp": 2,
        "schedule": "zbv",
        "virtual_stages": 2,
        "split": "auto",
        "ep": 1,
        "strategy": "collective",
        "fill_bubbles": "none",
        "layout": None,
    }
    chosen = {name for name in result.chosen if name.startswith("parallel.")}
    assert chosen == {f"parallel.{name}" for name in ("dp", "zero", "sequence", "cp", "virtual_stages", "ep")}


LAYOUTS = [
    "dp=1",
    "dp=4",
    "dp=4 zero=3",
    "dp=4 zero=2 replicate=2",
    "tp=4",
    "dp=2 tp=2 sp",
    "pp=4",
    "dp=2 pp=2 split=2,4",
    "pp=2 schedule=zbv",
    "dp=2 pp=2 schedule=interleaved virtual_stages=3 split=even",
    "zero=1 tp=2 pp=3",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_written_config_resolves_to_the_same_plan(layout, tmp_path):
    result = resolved(f"parallel.layout={layout}", on=machine(cores=4))
    write_config(result.config, {}, tmp_path / "config.toml")
    again = load_config(tmp_path / "config.toml")
    plan = resolve(again.config, TINY, machine(cores=2), None, 1000, again.origins).plan
    assert plan.layout == result.plan.layout
    assert plan.split == result.plan.split


@settings(max_examples=100)
@given(
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.integers(1, 3),
    st.integers(0, 3),
    st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"]),
    st.integers(1, 20),
    st.sampled_from(["fp64", "fp32", "bf16", "bf16-true"]),
)
def test_every_plan_has_a_prediction(tp, pp, dp, zero, schedule, global_batch, precision):
    layout = f"dp={dp} zero={zero} tp={tp} pp={pp}" + (f" schedule={schedule}" if pp > 1 else "")
    words = [
        f"parallel.layout={layout}",
        f"train.global_batch={max(global_batch, dp)}",
        f"memory.precision={precision}",
    ]
    plan = plan_of(*words, on=machine(gigabytes=64))
    assert plan.world == dp * tp * pp
    assert plan.num_microbatches * plan.micro_batch >= plan.rows_per_rank
    memory = predict_memory(TINY, plan, "adamw")
    assert all(size >= 0 for size in memory.values()) and memory["weights"] > 0 and memory["activations"] > 0
