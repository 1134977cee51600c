"""Step time: parts, bounds, what each setting costs, and published runs that must stay within reach."""

from __future__ import annotations

import json
import random
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from shardwise.cluster.describe.table import known_cluster
from shardwise.plan.prediction.stack import OURS, Stack
from shardwise.plan.prediction.state_time import MASTER_UPDATE_RATE, NORM_RATE, OPTIMIZER_RATE
from shardwise.plan.prediction.step_time import layer_times, least_step_seconds, step_seconds
from shardwise.spec.cluster import ClusterSpec, Device, Link
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import AdapterConfig
from shardwise.spec.split import even_split

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from stacks.foreign import ForeignStack

LLAMA = preset("llama2-7b")
H100 = known_cluster("h100", 1, 8)


def plan(**changes) -> Plan:
    values = dict(
        device="cuda",
        precision="bf16",
        seq_len=4096,
        global_batch=8,
        micro_batch=1,
        num_steps=1,
        threads_per_rank=1,
        reason="",
        dp=1,
    )
    return Plan(**(values | changes))


def seconds(
    here: Plan, spec: ModelSpec = LLAMA, cluster: ClusterSpec = H100, stack: Stack = OURS, **job
) -> dict[str, float]:
    about = Job(here.seq_len, here.global_batch, None, here.precision, **job)
    return step_seconds(spec, cluster, about, here, stack)


def total(*args, **more) -> float:
    return sum(seconds(*args, **more).values())


def test_one_process_computes_and_updates():
    assert seconds(plan()).keys() == {"compute", "optimizer", "launch"}
    assert seconds(plan(dp=8)).keys() == {"compute", "optimizer", "launch", "data-parallel"}


def test_the_rate_of_a_good_step():
    """llama2-7b on one H100, plain kernels: 45 to 60 % of its peak is what good runs reach."""
    done = 8 * 4096 * LLAMA.flops_per_token(4096)
    assert 0.45 < done / total(plan(micro_batch=4)) / 989e12 < 0.60


def test_copies_that_stay_save_casts_and_the_pass_that_clips():
    """Bytes per element that are not moved. FSDP2 rounds (6), copies out (4), widens (6, at half the rate) and puts
    away (12). Clipping reads and writes fp32 (8), the norm reads 4 instead of 2, and the update of 28 runs at another
    rate. With several micro-batches both add up in fp32."""
    here = plan(micro_batch=8)
    moved = 6 + 4 + 2 * 6 + 12 + 8 + (4 - 2) / NORM_RATE + 28 / OPTIMIZER_RATE - 28 / MASTER_UPDATE_RATE
    before, after = (seconds(replace(here, copies=copies)) for copies in (False, True))
    saved = before["compute"] + before["optimizer"] - after["compute"] - after["optimizer"]
    about = Job(here.seq_len, here.global_batch, None, here.precision)
    pricer = layer_times(LLAMA, H100, about, here, OURS).pricer
    assert saved == pytest.approx(pricer.pass_(moved * LLAMA.num_parameters), rel=0.02)
    assert 0 < total(plan()) - total(plan(copies=True)) < saved


def test_degrees_divide_the_work():
    one = seconds(plan())["compute"]
    assert seconds(plan(dp=2))["compute"] == pytest.approx(one / 2, rel=0.05)
    large = seconds(plan(micro_batch=8))["compute"]
    for part in (plan(tp=4, sequence=True, micro_batch=8), plan(cp=4, micro_batch=8)):
        assert large / 4 < seconds(part)["compute"] < 1.2 * large / 4  # smaller matmuls fill the card less
    piped = seconds(plan(pp=2, split=(16, 16)))["compute"]
    assert one / 2 < piped < one / 2 * 1.1  # the last stage has the head as well


def test_recomputation_takes_most_of_a_forward_pass():
    none, full, half, selective = (
        seconds(plan(recompute=mode)).get("recompute", 0.0) for mode in ("none", "full", "every-2", "selective")
    )
    compute = seconds(plan())["compute"]
    assert none == 0.0 and 0.20 * compute < full < 0.33 * compute
    assert half == pytest.approx(full / 2) and 0 < selective < 0.3 * full


def test_tensor_parallelism_costs_collectives_and_more_between_nodes():
    inside = seconds(plan(tp=8, sequence=True))["tensor-parallel"]
    across = seconds(plan(tp=16, sequence=True), cluster=known_cluster("h100", 2, 8))["tensor-parallel"]
    assert 0 < inside < across / 2
    hidden = seconds(plan(tp=8, sequence=True), stack=ForeignStack(overlaps_tensor=True))["tensor-parallel"]
    assert hidden < 0.6 * inside


@pytest.mark.parametrize("cluster", [known_cluster("a100-80", 8, 8, nic=2e9)])
def test_zero_stages_send_as_often_as_fsdp_does(cluster):
    """On a network so slow that nothing hides: stage 2 reduces with every micro-batch, stage 3 also gathers twice with
    every one."""
    sent = {
        zero: seconds(plan(dp=64, global_batch=256, zero=zero), cluster=cluster)["data-parallel"] for zero in range(4)
    }
    assert sent[1] == pytest.approx(sent[0], rel=0.35)  # parameters travel in two bytes, gradients in four
    assert 1.5 * sent[1] < sent[2] < sent[3]


def test_hybrid_sharding_keeps_gathers_inside_a_node():
    cluster = known_cluster("h100", 8, 8, nic=5e9)
    whole, hybrid = (
        seconds(plan(dp=64, global_batch=256, zero=3, replicate=n), cluster=cluster)["data-parallel"] for n in (1, 8)
    )
    assert hybrid < 0.5 * whole


def test_collectives_hide_behind_computing():
    apart = ForeignStack(overlaps_reduce=False, overlaps_gather=False)
    assert 2 * seconds(plan(dp=8, zero=3))["data-parallel"] < seconds(plan(dp=8, zero=3), stack=apart)["data-parallel"]


def test_quantized_collectives_are_shorter():
    cluster = known_cluster("v100-32", 24, 16, nic=3e9)
    usual, small = (
        seconds(plan(dp=384, global_batch=384, zero=3, precision="fp16", seq_len=1024, **how), cluster=cluster)[
            "data-parallel"
        ]
        for how in ({}, dict(quantize_weights="int8", quantize_gradients="int4", secondary_shard=16))
    )
    assert small < 0.5 * usual


@pytest.mark.parametrize(
    "schedule, stages", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zbv", 2)]
)
def test_schedules_wait_in_the_order_of_the_textbook(schedule, stages):
    waited = seconds(
        plan(pp=4, global_batch=32, schedule=schedule, virtual_stages=stages, split=even_split(32, 4 * stages))
    )
    usual = seconds(plan(pp=4, global_batch=32, split=even_split(32, 4)))
    low, high = {
        "gpipe": (0.99, 1.01),
        "1f1b": (1.0, 1.0),
        "interleaved": (0.3, 0.8),
        "zero-bubble": (0.3, 0.8),
        "zbv": (0.1, 0.9),
    }[schedule]
    assert low * usual["bubble"] <= waited["bubble"] <= high * usual["bubble"]


def test_experts_travel():
    spec = preset("tiny-moe").with_overrides(
        {"hidden": 2048, "num_layers": 8, "num_experts": 64, "expert_ffn": 1024, "num_heads": 16}
    )
    alone, spread = (seconds(plan(dp=8, zero=1, ep=ep), spec) for ep in (1, 8))
    assert "expert-parallel" not in alone and spread["expert-parallel"] > 0


def test_offloading_costs_time():
    """Measured on an H200, 1.1 B parameters: +0.40 s with the optimizer in CPU memory, +1.15 s with everything
    there."""
    spec = preset("tiny").with_overrides(
        {
            "num_layers": 16,
            "hidden": 2048,
            "num_heads": 32,
            "num_kv_heads": 8,
            "head_dim": 64,
            "ffn": 8192,
            "vocab": 32768,
        }
    )
    cluster = known_cluster("h200", 1, 1)
    here = plan(global_batch=8, micro_batch=8, seq_len=2048)
    before = total(here, spec, cluster)
    assert before == pytest.approx(0.2484, rel=0.1)
    added = {way: total(replace(here, offload=way), spec, cluster) - before for way in ("optimizer", "all")}
    assert added == pytest.approx({"optimizer": 0.40, "all": 1.15}, rel=0.15)


@pytest.mark.parametrize("rows", [1, 4])
def test_activations_that_leave_cost_what_was_measured(rows):
    """benchmarks/recompute.py on an H200: forward and backward without and with paging, milliseconds."""
    spec = preset("tiny").with_overrides(
        {
            "hidden": 2048,
            "num_heads": 16,
            "num_kv_heads": 8,
            "head_dim": 128,
            "ffn": 8192,
            "num_layers": 8,
            "vocab": 32768,
        }
    )
    stays, leaves = {1: (35.9, 106.8), 4: (134.2, 415.1)}[rows]
    here = plan(global_batch=rows, micro_batch=rows, precision="bf16-true")
    step = seconds(replace(here, activation_offload=True), spec, known_cluster("h200", 1, 1))
    assert step["compute"] * 1e3 == pytest.approx(stays, rel=0.1)
    assert (step["compute"] + step["offload"]) * 1e3 == pytest.approx(leaves, rel=0.25)


def test_adapters_save_the_gradients_of_weights():
    whole = total(plan(precision="bf16-true"))
    lora = total(plan(precision="bf16-true"), adapter=AdapterConfig(kind="lora", rank=16, targets=("all-linear",)))
    qlora = total(plan(precision="bf16-true"), adapter=AdapterConfig(kind="qlora", rank=16, targets=("all-linear",)))
    assert 0.6 * whole < lora < whole and lora < qlora


def test_small_models_wait_for_the_host():
    step = seconds(plan(seq_len=128, micro_batch=1), preset("tiny"))
    assert step["launch"] > step["compute"]
    assert seconds(plan(micro_batch=8))["launch"] < 0.01


def test_more_nodes_lose_more_to_the_slowest():
    few, many = (seconds(plan(dp=8 * n, global_batch=512), cluster=known_cluster("h100", n, 8)) for n in (2, 32))
    assert few["straggler"] / sum(few.values()) < many["straggler"] / sum(many.values()) < 0.05


# The bound ------------------------------------------------------------------------------------------------------------


def test_a_slow_link_between_stages_carries_one_message_after_the_other():
    """At 100 MB/s a micro-batch's 33 MB take a third of a second, each way, and 32 of them cannot take less than 32
    times that."""
    slow = known_cluster("h100", 2, 1, nic=1e8)
    here = plan(pp=2, split=even_split(LLAMA.num_layers, 2), global_batch=32)
    size = 4096 * LLAMA.hidden * 2
    assert total(here, cluster=slow) > 32 * size / 1e8 > total(here, cluster=known_cluster("h100", 2, 1))


def test_a_pipeline_is_as_slow_as_its_border_between_nodes():
    """Four stages on two nodes: two of three sends stay inside, and the step waits for the third."""
    here = plan(pp=4, split=even_split(LLAMA.num_layers, 4), global_batch=32)
    size = 4096 * LLAMA.hidden * 2
    inside, across = known_cluster("h100", 1, 4), known_cluster("h100", 2, 2, nic=1e8)
    assert total(here, cluster=across) > 32 * size / 1e8 > total(here, cluster=inside)


def test_cards_of_a_node_share_its_cpu_memory():
    here = plan(dp=8, zero=3, replicate=1, offload="optimizer", global_batch=8)
    alone = seconds(here, cluster=known_cluster("h100", 8, 1))["offload"]
    assert seconds(here, cluster=known_cluster("h100", 1, 8))["offload"] > 1.5 * alone


def test_only_nodes_in_use_have_stragglers():
    one, all_of_them = plan(dp=8), plan(dp=64, global_batch=64)
    large = known_cluster("h100", 8, 8)
    assert "straggler" not in seconds(one, cluster=large) and seconds(all_of_them, cluster=large)["straggler"] > 0


def random_plan(draw: random.Random) -> tuple[ModelSpec, ClusterSpec, Plan]:
    spec = draw.choice([LLAMA, preset("gpt2"), preset("llama3-8b"), preset("tiny-moe"), preset("gemma2-2b")])
    nodes = draw.choice([1, 2, 8])
    tp, pp, cp = draw.choice([1, 2]), draw.choice([1, 2, 4]), draw.choice([1, 2])
    schedule = draw.choice(["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
    stages = {"interleaved": 2, "zbv": 2}.get(schedule, 1) if pp > 1 else 1
    if pp * stages > spec.num_layers:
        pp, stages, schedule = 1, 1, "1f1b"
    dp = max(1, nodes * 8 // (tp * pp * cp))
    zero = draw.choice([0, 1, 2, 3])
    here = plan(
        seq_len=draw.choice([256, 1024, 4096]),
        micro_batch=draw.choice([1, 2]),
        global_batch=dp * draw.choice([2, 4, 16]),
        dp=dp,
        tp=tp,
        sequence=tp > 1 and draw.random() < 0.5,
        cp=cp,
        cp_kind=draw.choice(["ring", "ulysses"]),
        pp=pp,
        virtual_stages=stages,
        schedule=schedule if pp > 1 else "1f1b",
        split=even_split(spec.num_layers, pp * stages) if pp > 1 else (),
        zero=zero,
        replicate=1 if zero else dp,
        recompute=draw.choice(["none", "full", "selective", "sqrt", "every-2"]),
        precision=draw.choice(["bf16", "fp32", "bf16-true", "fp8"]),
        offload=draw.choice(["none", "none", "optimizer", "all"]),
    )
    return spec, known_cluster(draw.choice(["h100", "a100-80", "b200"]), nodes, 8), here


def test_a_step_without_the_simulation_is_no_longer_and_not_much_shorter():
    shares = []
    for seed in range(40):
        spec, cluster, here = random_plan(random.Random(seed))
        job = Job(here.seq_len, here.global_batch, None, here.precision)
        parts = step_seconds(spec, cluster, job, here)
        assert all(value >= 0 for value in parts.values())
        shares.append(least_step_seconds(spec, cluster, job, here, None) / sum(parts.values()))
        assert shares[-1] <= 1 + 1e-9 and (here.pp > 1 or shares[-1] == pytest.approx(1))
    assert min(shares) > 0.5 and sum(shares) > 0.9 * len(shares)


# What was measured ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "which, largest, median", [("fitted", 0.1, 0.05), ("held_out", 0.1, 0.05), ("other_families", 0.17, 0.08)]
)
def test_jobs_on_an_h200_are_predicted_as_well_as_today(which, largest, median):
    """benchmarks/gpu/prediction.py measured them; whoever changes the prediction must keep to it. The aim is 10 % for
    each."""
    import sys

    root = Path(__file__).parents[2] / "benchmarks"
    sys.path.insert(0, str(root))
    from gpu.prediction import predicted

    cases = json.loads((root / f"results/prediction_{which}_h200.json").read_text())["cases"]
    cases.pop("3b adam8 mb1", None)  # torchao's own update, 0.2 s of it; now it is one kernel, and not measured yet
    errors = {name: predicted(one, "h200")["step_s"] / one["measured"]["step_s"] - 1 for name, one in cases.items()}
    assert max(map(abs, errors.values())) < largest and statistics.median(map(abs, errors.values())) < median, errors


STEPS = {
    ("1.5b", "ours:products=library"): 0.5051,
    ("8b-wide", "ours:products=library"): 0.8007,
    ("8b-wide", "ours:precision=fp8,fp8_recipe=tensorwise,products=library"): 0.6287,
    ("8b-wide", "ours:precision=fp8,fp8_recipe=tensorwise,fp8_head=true,products=library"): 0.5789,
    ("32k", "ours:products=library"): 1.1855,
    ("moe", "ours:products=library"): 0.3422,
    ("lora-8b", "ours:products=library"): 0.4907,
    ("128k", "ours:products=library"): 12.877,
    ("1.5b", "ours"): 0.4923,
    ("8b-wide", "ours"): 0.7871,
    ("8b-wide", "ours:micro_batch=16"): 1.5520,
    ("8b", "ours"): 1.3657,
    ("1.5b", "ours:attention=flash4"): 0.4710,
    ("8b-wide", "ours:attention=flash4"): 0.7627,
    ("32k", "ours:attention=flash4"): 1.1254,
    ("32k", "ours:attention=flash4,micro_batch=2"): 2.1989,
    ("8b-wide", "ours:attention=flash4,micro_batch=16"): 1.5282,
    ("8b-wide", "ours:attention=flash4,micro_batch=20"): 1.8802,
    ("8b-wide", "ours:attention=flash4,precision=fp8,fp8_recipe=tensorwise"): 0.5908,
    ("8b-wide", "ours:attention=flash4,precision=fp8,fp8_recipe=tensorwise,fp8_head=true"): 0.5396,
    ("moe", "ours:attention=flash4"): 0.3347,
    ("lora-8b", "ours:attention=flash4"): 0.4658,
    ("lora-8b", "ours:attention=flash4,precision=fp8,fp8_recipe=tensorwise,fp8_head=true"): 0.3262,
}


def test_compiled_steps_on_an_h200_take_what_was_measured():
    """benchmarks/gpu/throughput.py on 2026-11-16, torch 2.11, power-limited to 700 W. Those with torch's matmuls also
    had a loss with two passes over the logits more: 1.4 % of the shortest. FlashAttention 4's were predicted before
    they were measured."""
    import sys

    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from gpu.shapes import case_of
    from gpu.with_ours import predicted

    errors = {row: predicted(case_of(*row))["step_s"] / took - 1 for row, took in STEPS.items()}
    assert max(map(abs, errors.values())) < 0.05 and statistics.median(map(abs, errors.values())) < 0.03, errors


MEGATRON = ForeignStack(
    attention="math",
    fused_matmuls=True,
    fused_activation=True,
    dropout=True,
    logits_again=False,
    selective="attention",
    stops_early=False,
    gradient_passes=8,
    reduce_bytes=2,
    gather_bytes=2,
    casts_gathered=False,
    overlaps_reduce=False,
    overlaps_gather=False,
    gathers_again=True,
    overlaps_tensor_backward=True,
    scatters_sends=True,
    overlaps_pipeline=False,
    pads_vocab=128,
    batch_first=False,
    split_loss=True,
)
NANOTRON = ForeignStack(
    attention="flash2",
    fused_matmuls=True,
    logits_again=False,
    gradient_passes=10,
    reduce_bytes=4,
    gather_bytes=2,
    casts_gathered=False,
    overlaps_reduce=False,
    overlaps_gather=False,
    overlaps_pipeline=False,
    batch_first=False,
    complex_rope=True,
    split_loss=True,
)
GPT = dict(norm="layer", gated=False, activation="gelu", positions="learned", tied=True, mlp_bias=True)
MODELS = {
    "22b": ModelSpec(name="22b", num_layers=48, hidden=6144, num_heads=64, ffn=24576, vocab=51200, **GPT),
    "0.9b": ModelSpec(name="0.9b", num_layers=16, hidden=2048, num_heads=16, ffn=8192, vocab=50257, **GPT),
    "1.3b": ModelSpec(name="1.3b", num_layers=24, hidden=2048, num_heads=16, ffn=8192, vocab=50257, **GPT),
    "1b": ModelSpec(name="1b", num_layers=16, hidden=2048, num_heads=32, ffn=8192, vocab=131072, tied=True),
    "8b": ModelSpec(name="8b", num_layers=32, hidden=4096, num_heads=32, ffn=14336, vocab=131072),
}
A100, SWEEP = known_cluster("a100-80", 1, 8), known_cluster("h100", 1, 8)
PUBLISHED = [  # model, cluster, stack, layout, seconds
    (
        "22b",
        A100,
        MEGATRON,
        dict(tp=8, recompute="full", micro_batch=4, global_batch=4, seq_len=2048, precision="fp16"),
        1.42,
    ),
    (
        "22b",
        A100,
        MEGATRON,
        dict(tp=8, sequence=True, recompute="selective", micro_batch=4, global_batch=4, seq_len=2048, precision="fp16"),
        1.10,
    ),
    (
        "0.9b",
        A100,
        MEGATRON,
        dict(dp=4, recompute="full", micro_batch=2, global_batch=32, seq_len=1024, precision="fp16"),
        0.4064,
    ),
    (
        "1.3b",
        A100,
        MEGATRON,
        dict(
            dp=2, pp=2, split=(12, 12), recompute="full", micro_batch=4, global_batch=16, seq_len=1024, precision="fp16"
        ),
        0.4105,
    ),
    ("1b", SWEEP, NANOTRON, dict(dp=8, micro_batch=2, global_batch=256), 3.265),
    ("1b", SWEEP, NANOTRON, dict(dp=8, zero=1, micro_batch=1, global_batch=256), 3.36),
    ("1b", SWEEP, NANOTRON, dict(dp=2, tp=4, sequence=True, micro_batch=16, global_batch=256), 3.901),
    ("8b", SWEEP, NANOTRON, dict(dp=4, zero=1, tp=2, sequence=True, micro_batch=1, global_batch=256), 18.35),
    ("8b", SWEEP, NANOTRON, dict(tp=8, sequence=True, micro_batch=8, global_batch=256), 22.18),
    (
        "8b",
        SWEEP,
        NANOTRON,
        dict(dp=2, zero=1, tp=2, sequence=True, pp=2, split=(18, 14), micro_batch=2, global_batch=256),
        18.68,
    ),
]


def test_published_runs_stay_within_reach():
    """Korthikanti 2022 (table 5), vTrain's A100 runs, the nanotron sweep: figures as published."""
    errors = [
        total(plan(**layout), MODELS[name], cluster, stack) / measured - 1
        for name, cluster, stack, layout, measured in PUBLISHED
    ]
    assert statistics.median(map(abs, errors)) < 0.10 and max(map(abs, errors)) < 0.20, errors


# CPUs -----------------------------------------------------------------------------------------------------------------


def test_processor_cores_are_predicted_too():
    """A device is one core; a rank has as many as it has threads. Messages between processes take their time."""
    core = Device("cpu", 2**30, MappingProxyType({"fp32": 5e10}), 1.0, 5e9, 1.0, kind="cpu")
    cluster = ClusterSpec("cores", 1, 4, core, (Link("loopback", 4, 1e9, 1e-4, 1.0, 0.0),))
    here = plan(device="cpu", precision="fp32", seq_len=256, micro_batch=4, global_batch=16, threads_per_rank=1)
    one, two = (seconds(replace(here, threads_per_rank=n), preset("tiny"), cluster) for n in (1, 2))
    done = 16 * 256 * preset("tiny").flops_per_token(256)
    assert done / 5e10 < one["compute"] < 3 * done / 5e10
    assert two["compute"] < 0.7 * one["compute"]
    split = seconds(replace(here, dp=4, replicate=4), preset("tiny"), cluster)
    assert split["data-parallel"] > 4 * preset("tiny").num_parameters / 1e9
