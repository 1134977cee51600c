"""The best layout for each framework is one that its own parser takes, whatever the model and the cluster.

Megatron-LM core_v0.16.1, torchtitan 0.2.2 and DeepSpeed 0.19.8 are not installed with the other test tools (their
parsers import Triton, torchdata and more); where they are on the path, their own parsers read every export:

    PYTHONPATH=MEGATRON-LM:TORCHTITAN:DEEPSPEED python -m pytest tests/interop/test_foreign_parsers.py
"""

from __future__ import annotations

from functools import cache

import foreign_parsers as parsers
import pytest

from shardwise.cli.plan_as import AsFramework, as_framework
from shardwise.errors import UserError
from shardwise.interop.frameworks.export import FRAMEWORKS
from shardwise.interop.frameworks.torchtitan_models import flavors
from shardwise.plan.answer.answer import Answer, answer
from shardwise.plan.answer.question import ask

CASES = {
    "llama3-8b": "2x8xh100 8k 1M",
    "llama3-70b": "16x8xh100 8k 4M parallel.dp=8",
    "qwen3-8b": "4x8xh100:nic=25GB/s 4k 2M",
    "qwen3-30b-a3b": "8x8xh100 4k 4M parallel.pp=1 parallel.cp=1 parallel.tp=1",
    "mixtral-8x7b": "4x8xh100 8k 2M parallel.tp=1 parallel.cp=1",
    "deepseek-v3": "64x8xh100 4k 16M parallel.cp=1 parallel.tp=1 parallel.ep=64 parallel.pp=8",
    "gpt2": "1x4xh100 1k 512k",
    "gpt3-175b": "16x8xh100 2k 2M parallel.tp=8 parallel.cp=1",
    "mistral-7b": "1x8xh100 32k 1M",
    "smollm2-135m": "1x8xrtx4090 2k 512k",
    "llama2-13b": "1x8xa100-40gb 4k 512k memory.precision=fp16",
}


@cache
def row_1(model: str) -> Answer:
    cluster, seq, batch, *words = CASES[model].split()
    return answer(ask(model, cluster, seq=seq, batch=batch, words=words), 1, detail=False)


@cache
def best(model: str, framework: str) -> AsFramework | None:
    """The framework's best layout; None where it refuses the model, or where nothing that it runs is asked for."""
    try:
        return as_framework(row_1(model), framework)
    except UserError as refused:
        assert "would not train" in str(refused) or "fits that" in str(refused)
        return None


def exported(model: str, framework: str) -> tuple[str, int]:
    found = best(model, framework)
    if found is None:
        pytest.skip(f"{framework} does not train {model}")
    return found.exported.text, found.candidate.plan.world


@pytest.mark.parametrize("model", CASES)
def test_what_is_written_is_what_the_parsers_accept(model):
    for name, check in (
        ("megatron", parsers.megatron_by_table),
        ("torchtitan", parsers.torchtitan_by_table),
        ("deepspeed", parsers.deepspeed_by_table),
    ):
        if found := best(model, name):
            check(found.exported.text, found.candidate.plan.world)


@pytest.mark.parametrize("model", CASES)
def test_a_frameworks_best_is_row_1_or_says_why_not(model):
    winner = row_1(model).rows[0].candidate
    for name in FRAMEWORKS:
        if found := best(model, name):
            assert bool(found.lacks) == (found.candidate.plan != winner.plan)
            assert found.slower > 0.95 and (found.lacks or found.slower == 1)
            assert not found.framework.runs_in(row_1(model).question.spec, found.candidate.plan)


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("model", CASES)
def test_accelerate_itself(model, tmp_path, monkeypatch):
    text, world = exported(model, "accelerate")
    _, sizes = parsers.accelerate_itself(text, world, tmp_path / "config.yaml", monkeypatch)
    assert sizes is None or sizes.total_size == world


@pytest.mark.parametrize("model", CASES)
def test_megatron_itself(model, monkeypatch):
    pytest.importorskip("megatron.training.arguments")
    args, config = parsers.megatron_itself(*exported(model, "megatron"), monkeypatch)
    spec, plan = row_1(model).question.spec, best(model, "megatron").candidate.plan
    assert (
        args.data_parallel_size == plan.dp and (args.virtual_pipeline_model_parallel_size or 1) == plan.virtual_stages
    )
    assert (config.num_layers, config.hidden_size, config.kv_channels) == (
        spec.num_layers,
        spec.hidden,
        spec.v_head_dim or spec.head_dim,
    )
    assert config.hidden_dropout == config.attention_dropout == 0 and config.layernorm_epsilon == spec.norm_eps


@pytest.mark.parametrize("model", CASES)
def test_torchtitan_itself(model, tmp_path):
    pytest.importorskip("torchtitan.config")
    _, arguments = parsers.torchtitan_itself(*exported(model, "torchtitan"), tmp_path / "config.toml")
    spec = row_1(model).question.spec
    assert (arguments.n_layers, arguments.dim, arguments.n_heads) == (spec.num_layers, spec.hidden, spec.num_heads)


@pytest.mark.parametrize("model", CASES)
def test_deepspeed_itself(model):
    pytest.importorskip("deepspeed.runtime.config")
    config = parsers.deepspeed_itself(*exported(model, "deepspeed"))
    assert config.train_batch_size == best(model, "deepspeed").candidate.plan.global_batch


def test_the_table_of_torchtitans_models_is_its_own():
    protocols = pytest.importorskip("torchtitan.protocols.train_spec")
    for one in flavors():
        theirs, spec = protocols.get_train_spec(one.name).model_args[one.flavor], one.spec
        names = dict(n_layers="num_layers", dim="hidden", n_heads="num_heads", vocab_size="vocab", norm_eps="norm_eps")
        names |= dict(
            rope_theta="rope_theta", q_lora_rank="q_lora_rank", v_head_dim="v_head_dim", rope_factor="rope_factor"
        )
        names |= dict(
            qk_nope_head_dim="qk_nope_head_dim", kv_lora_rank="kv_lora_rank", n_dense_layers="first_dense_layers"
        )
        names |= dict(
            enable_weight_tying="tied", qk_norm="qk_norm", hidden_dim="ffn", inter_dim="ffn", head_dim="head_dim"
        )
        names |= dict(
            n_kv_heads="num_kv_heads", qk_rope_head_dim="qk_rope_head_dim", original_seq_len="rope_original_max_seq_len"
        )
        for theirs_name, ours in names.items():
            if hasattr(theirs, theirs_name):
                assert getattr(theirs, theirs_name) == getattr(spec, ours), (one.flavor, ours)
        if one.name == "llama3":
            width = int(theirs.ffn_dim_multiplier * int(2 * 4 * theirs.dim / 3))
            assert -(-width // theirs.multiple_of) * theirs.multiple_of == spec.ffn
        if spec.is_moe:
            experts = theirs.moe_args
            assert (experts.num_experts, experts.top_k, experts.num_shared_experts, theirs.moe_inter_dim) == (
                spec.num_experts,
                spec.experts_per_token,
                spec.num_shared_experts,
                spec.expert_ffn,
            )
            assert (experts.score_func == "sigmoid") == (spec.router == "sigmoid-bias")
            assert (experts.route_scale, experts.route_norm) == (spec.routed_scaling, spec.norm_topk)
            assert (experts.num_expert_groups or 1) == spec.num_expert_groups
