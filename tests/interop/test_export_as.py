"""Rows in other frameworks' words: what they can do is said in their flags, what they cannot is said too."""

from __future__ import annotations

import json
import tomllib

import pytest

from shardwise.errors import UserError
from shardwise.interop.frameworks.export import FRAMEWORKS, export_as
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset

SPEC = preset("llama3-8b")
JOB = Job(seq_len=8192, global_batch=64, tokens=10**12)


def plan(**changes: object) -> Plan:
    values = dict(device="cuda", precision="bf16", seq_len=8192, global_batch=64, micro_batch=1, num_steps=1)
    return Plan(**values | {"threads_per_rank": 1, "reason": "", **changes})  # type: ignore[arg-type]


def said(framework: str, **changes: object) -> tuple[str, str]:
    made = export_as(framework, SPEC, JOB, plan(**changes), 8)
    return made.text, " ".join(made.missing)


def test_megatron_flags():
    text, missing = said("megatron", dp=4, zero=1, tp=2, sequence=True, pp=2, split=(16, 16), recompute="full")
    for flag in (
        "--tensor-model-parallel-size 2",
        "--pipeline-model-parallel-size 2",
        "--sequence-parallel",
        "--use-distributed-optimizer",
        "--recompute-granularity full",
        "--micro-batch-size 1",
        "--global-batch-size 64",
        "--num-query-groups 8",
        "--bf16",
    ):
        assert flag in text
    assert "schedule" not in missing


def test_megatron_has_no_zero_bubble():
    assert "schedule=zbv" in said("megatron", pp=2, schedule="zbv", virtual_stages=2, split=(8, 8, 8, 8))[1]


def test_torchtitan_is_toml_with_both_data_parallel_degrees():
    text, missing = said("torchtitan", dp=8, zero=3, replicate=2, tp=2, sequence=True, cp=2, cp_kind="ulysses")
    made = tomllib.loads(text)["parallelism"]
    assert (made["data_parallel_replicate_degree"], made["data_parallel_shard_degree"]) == (2, 4)
    assert (made["tensor_parallel_degree"], made["fsdp_reshard_after_forward"]) == (2, "always")
    assert "ulysses" in missing


def test_deepspeed_batches_multiply_up():
    text, missing = said("deepspeed", dp=8, zero=2, tp=2, micro_batch=2, offload="optimizer")
    made = json.loads(text)
    assert made["train_batch_size"] == 8 * made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"]
    assert made["zero_optimization"]["stage"] == 2 and made["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert made["tensor_parallel"] == {"autotp_size": 2}
    assert "pp=" not in missing and "pp=2" in said("deepspeed", pp=2, split=(16, 16))[1]


def test_accelerate_counts_processes():
    text, missing = said("accelerate", dp=16, zero=3)
    assert "num_processes: 16" in text and "num_machines: 2" in text and "fsdp_reshard_after_forward: true" in text
    assert "zero=1" in said("accelerate", dp=16, zero=1)[1] and "zero=1" not in missing


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_of_a_layout_is_left_out_silently(framework):
    """Each axis is in the text or among what is missing."""
    text, missing = said(
        framework, dp=2, zero=1, tp=2, sequence=True, cp=2, pp=2, split=(16, 16), recompute="selective"
    )
    words = (text + missing).lower()
    for names in (
        ("zero=1", "distributed-optimizer", '"stage": 1'),
        ("tp_size: 2", "tensor_parallel_degree = 2", "tensor-model-parallel-size 2", "autotp_size"),
        ("cp=2", "cp_size: 2", "context_parallel_degree = 2", "context-parallel-size 2"),
        ("pp=2", "pipeline_parallel_degree = 2", "pipeline-model-parallel-size 2"),
        ("recompute", "activation_checkpoint"),
    ):
        assert any(name in words for name in names), (framework, names)


def test_printed_json_stays_json_with_its_notes():
    made = export_as("deepspeed", SPEC, JOB, plan(pp=2, split=(16, 16)), 8)
    assert any("pp=2" in note for note in json.loads(made.to_print("row 1"))["_shardwise"])


def test_an_unknown_framework_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="deepspead") as problem:
        export_as("deepspead", SPEC, JOB, plan(), 8)
    assert problem.value.fix == "--as deepspeed"
