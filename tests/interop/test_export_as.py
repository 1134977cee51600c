"""Plans for other frameworks: what they cannot run is known, what is written says the model and the layout."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace

import pytest
from foreign_parsers import megatron_by_table
from hypothesis import given
from hypothesis import strategies as st

from shardwise.errors import UserError
from shardwise.interop.frameworks.export import FRAMEWORKS, export_as, framework_named
from shardwise.interop.frameworks.framework import UpdateRule
from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import OptimizerConfig
from shardwise.spec.split import even_split

SPEC = preset("llama3-8b")
JOB = Job(seq_len=8192, global_batch=64, tokens=10**12)


def plan(**changes: object) -> Plan:
    values = dict(device="cuda", precision="bf16", seq_len=8192, global_batch=64, micro_batch=1, num_steps=1)
    return Plan(**values | {"threads_per_rank": 1, "reason": "", **changes})  # type: ignore[arg-type]


def said(framework: str, model: str = "llama3-8b", **changes: object) -> tuple[str, str]:
    made = export_as(framework, preset(model), JOB, plan(**changes), 8)
    return made.text, " ".join(made.missing)


def flags(model: str, **changes: object) -> object:
    made = plan(**changes)
    return megatron_by_table(said("megatron", model, **changes)[0], made.world)


def lacks(framework: str, model: str = "llama3-8b", **changes: object) -> str:
    return "; ".join(FRAMEWORKS[framework].runs_in(preset(model), plan(**changes)))


# The layout ----------------------------------------------------------------------------------------------------------


def test_megatron_splits_even_stages_by_number_and_others_layer_by_layer():
    even = flags(
        "llama3-8b", dp=4, zero=1, tp=2, sequence=True, pp=2, split=(8,) * 4, virtual_stages=2, schedule="interleaved"
    )
    assert even.num_virtual_stages_per_pipeline_rank == 2
    assert even.pipeline_model_parallel_layout is None and even.sequence_parallel and even.use_distributed_optimizer
    uneven = flags("llama3-8b", dp=4, zero=1, pp=2, split=(9, 8, 8, 7), virtual_stages=2, schedule="interleaved")
    assert uneven.pipeline_model_parallel_layout == "E" + "|".join(["t" * 9, "t" * 8, "t" * 8, "t" * 7]) + "L"
    assert uneven.num_virtual_stages_per_pipeline_rank is None


def test_megatron_zero_3_is_its_fsdp_with_the_checkpoints_of_that():
    made = flags("llama3-8b", dp=8, zero=3)
    assert made.use_megatron_fsdp and made.ckpt_format == "fsdp_dtensor"
    assert made.data_parallel_sharding_strategy == "optim_grads_params"
    assert "CUDA_DEVICE_MAX_CONNECTIONS must not be 1" in said("megatron", dp=8, zero=3)[1]


def test_megatron_recomputes_as_many_layers_of_a_stage():
    made = flags("llama3-8b", dp=2, pp=2, split=(16, 16), recompute="every-4")
    assert (made.recompute_granularity, made.recompute_method, made.recompute_num_layers) == ("full", "block", 4)
    assert "first 4 of 16 layers" in said("megatron", dp=2, pp=2, split=(16, 16), recompute="every-4")[1]
    assert flags("llama3-8b", recompute="sqrt").recompute_num_layers == 4  # 32 layers in groups of a divisor


def test_torchtitan_is_given_the_modules_of_every_stage():
    text, _ = said("torchtitan", dp=4, zero=2, pp=2, split=(9, 8, 8, 7), virtual_stages=2, schedule="interleaved")
    made = tomllib.loads(text)["parallelism"]
    stages = made["module_fqns_per_model_part"]
    assert [len(stage) for stage in stages] == [10, 8, 8, 9]
    assert stages[0][:2] == ["tok_embeddings", "layers.0"] and stages[-1][-3:] == ["layers.31", "norm", "output"]
    assert made["pipeline_parallel_schedule"] == "Interleaved1F1B" and made["fsdp_reshard_after_forward"] == "never"


def test_torchtitan_shards_and_replicates():
    text, _ = said("torchtitan", dp=8, zero=3, replicate=2, tp=2, sequence=True, cp=2, recompute="every-2")
    made = tomllib.loads(text)
    axes = made["parallelism"]
    assert (axes["data_parallel_replicate_degree"], axes["data_parallel_shard_degree"]) == (2, 4)
    assert (axes["tensor_parallel_degree"], axes["context_parallel_degree"]) == (2, 2)
    assert made["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "2"}


def test_deepspeed_batches_multiply_up_over_data_parallel_ranks():
    text, _ = said("deepspeed", dp=8, zero=2, tp=2, micro_batch=2, offload="optimizer")
    made = json.loads(text)
    assert made["train_batch_size"] == 8 * made["train_micro_batch_size_per_gpu"] * made["gradient_accumulation_steps"]
    assert made["zero_optimization"]["stage"] == 2 and made["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert made["tensor_parallel"] == {"autotp_size": 2}


def test_accelerate_multiplies_up_to_its_processes():
    text, _ = said("accelerate", dp=16, zero=3, replicate=2, tp=2)
    sizes = dict(line.strip().rsplit(": ", 1) for line in text.splitlines() if "_size: " in line)
    sizes = {name.removeprefix("parallelism_config_"): int(size) for name, size in sizes.items()}
    assert sizes == {"dp_replicate_size": 2, "dp_shard_size": 8, "tp_size": 2, "cp_size": 1, "sp_size": 1}
    assert "num_processes: 32" in text and "num_machines: 4" in text and "reshard_after_forward: true" in text


@pytest.mark.parametrize(
    ("framework", "changes", "reason"),
    [
        ("megatron", dict(pp=2, schedule="zbv", virtual_stages=2, split=(8,) * 4), "zero-bubble"),
        (
            "megatron",
            dict(dp=16, pp=3, schedule="interleaved", virtual_stages=2, split=(6, 6, 5, 5, 5, 5)),
            "interleaved",
        ),
        ("megatron", dict(dp=2, zero=3, pp=2, split=(16, 16)), "pipelines together with its FSDP"),
        ("megatron", dict(recompute="selective"), "selective"),
        ("megatron", dict(dp=2, zero=3, offload="optimizer"), "zero=1"),
        ("megatron", dict(dp=24), "uneven number of sequences"),
        ("torchtitan", dict(dp=2, zero=1), "zero=1"),
        ("torchtitan", dict(dp=2, zero=2, cp=2, cp_kind="ulysses"), "Ulysses"),
        ("torchtitan", dict(dp=2, zero=2, tp=2), "without sequence parallelism"),
        ("torchtitan", dict(dp=2, tp=2, sequence=True), "replicas without shards"),
        ("torchtitan", dict(dp=2, zero=2, pp=2, schedule="zero-bubble", split=(16, 16)), "one stage per rank"),
        ("torchtitan", dict(dp=2, zero=2, recompute="sqrt"), "groups of layers"),
        ("deepspeed", dict(pp=2, split=(16, 16)), "pipelines"),
        ("deepspeed", dict(dp=2, zero=3, tp=2), "zero=3"),
        ("deepspeed", dict(dp=2, zero=1, cp=2), "context parallelism"),
        ("accelerate", dict(dp=2, zero=1), "zero=1"),
        ("accelerate", dict(dp=2, tp=2), "without shards"),
        ("accelerate", dict(dp=2, zero=2, recompute="selective"), "whole blocks"),
    ],
)
def test_what_a_framework_cannot_run_is_said_and_not_written(framework, changes, reason):
    assert reason in lacks(framework, **changes)
    with pytest.raises(UserError, match="does not run"):
        said(framework, **changes)


def test_models_have_rules_of_their_own():
    assert "for this model" in lacks("torchtitan", "qwen3-8b", dp=2, zero=2, pp=2, split=(18, 18))
    assert "FlexAttention" in lacks("torchtitan", "deepseek-v3", dp=2, zero=2, cp=2)
    assert "sliding windows" in lacks("megatron", "mistral-7b", cp=2) and not lacks("megatron", cp=2)
    assert "experts" in lacks("accelerate", "mixtral-8x7b", dp=2, zero=2, tp=2) and not lacks(
        "accelerate", dp=2, zero=2, tp=2
    )
    many = dict(dp=1, cp=16, cp_kind="ulysses", zero=1)
    assert "key-value heads" in lacks("megatron", **many) and "Ulysses" not in lacks("megatron", **many | {"cp": 8})
    split = dict(dp=4, zero=1, ep=4, replicate=2)
    assert "same experts" in lacks("megatron", "mixtral-8x7b", **split)
    assert "same experts" not in lacks("megatron", "mixtral-8x7b", **split | {"ep": 2})
    assert "sliding windows" in lacks("accelerate", "mistral-7b", dp=2, zero=2, cp=2)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Grid, Pace, States, Saving]:
    tp, pp = draw(st.sampled_from((1, 2, 16))), draw(st.sampled_from((1, 2, 4)))
    cp, kind = draw(st.sampled_from(((1, "ring"), (2, "ring"), (2, "ulysses"))))
    grid = Grid(draw(st.sampled_from((1, 2, 4, 24))), tp, tp > 1 and draw(st.booleans()), cp, kind, pp, 1)
    how = draw(st.sampled_from((("1f1b", 1), ("interleaved", 2), ("zbv", 2)))) if pp > 1 else ("1f1b", 1)
    zero = draw(st.integers(0, 3))
    replicate = draw(st.sampled_from((1, grid.dp))) if zero else grid.dp
    saving = Saving(
        draw(st.sampled_from(("none", "selective", "full", "every-4", "sqrt"))),
        draw(st.sampled_from(("none", "optimizer", "all"))),
        draw(st.booleans()),
    )
    return grid, Pace(draw(st.sampled_from((1, 2))), *how), States(zero, replicate), saving


@given(layouts(), st.sampled_from(sorted(FRAMEWORKS)))
def test_a_search_leaves_out_exactly_what_the_framework_does_not_run(parts, name):
    """A whole layout is judged as the plan it makes; a region is left out only if nothing in it runs."""
    grid, pace, states, saving = parts
    framework, accept = FRAMEWORKS[name], FRAMEWORKS[name].accepts(SPEC, 8192, 64)
    split = even_split(SPEC.num_layers, grid.pp * pace.virtual_stages) if grid.pp > 1 else ()
    values = {key: value for part in parts for key, value in part._asdict().items()}
    runs = not framework.runs_in(SPEC, plan(**values, split=split))
    assert accept(grid, pace, states, saving) == runs
    assert not runs or all(
        accept(grid, *known) for known in ((None,) * 3, (None, states, None), (None, states, saving))
    )


# The model -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["llama3-8b", "llama3-70b"])
def test_llama_3_keeps_its_rotary_base_and_has_no_dropout(model):
    made = flags(model)
    assert made.rotary_base == 500000 and made.norm_epsilon == 1e-5 and made.num_query_groups == 8
    assert made.attention_dropout == made.hidden_dropout == 0.0
    assert made.swiglu and made.disable_bias_linear and made.untie_embeddings_and_output_weights
    assert made.vocab_size == 128256 and made.make_vocab_size_divisible_by == 1 and not made.use_rope_scaling
    assert flags("llama3.1-8b").use_rope_scaling and flags("llama3.2-1b").rope_scaling_factor == 32


def test_qwen_3_has_norms_of_queries_and_keys():
    made = flags("qwen3-8b")
    assert made.qk_layernorm and made.norm_epsilon == 1e-6 and made.rotary_base == 10**6 and made.kv_channels == 128
    moe = flags("qwen3-30b-a3b")
    assert (moe.num_experts, moe.moe_router_topk, moe.moe_ffn_hidden_size) == (128, 8, 768)
    assert moe.moe_router_score_function == "softmax" and not moe.moe_router_pre_softmax
    assert moe.moe_router_load_balancing_type == ["seq_aux_loss"] and moe.moe_aux_loss_coeff == [0.001]
    assert flags("qwen2.5-7b").add_qkv_bias and flags("qwen2.5-7b").disable_bias_linear


def test_deepseek_v3_keeps_its_dense_layers_shared_experts_and_router():
    made = flags("deepseek-v3", ep=1)
    assert made.moe_layer_freq == [0] * 3 + [1] * 58 and made.moe_shared_expert_intermediate_size == 2048
    assert made.moe_router_score_function == "sigmoid" and made.moe_router_enable_expert_bias
    assert made.moe_router_bias_update_rate == 0.001 and made.moe_router_topk_scaling_factor == 2.5
    assert (made.moe_router_num_groups, made.moe_router_group_topk) == (8, 4)
    assert (made.qk_head_dim, made.qk_pos_emb_head_dim, made.v_head_dim) == (128, 64, 128)
    assert (made.q_lora_rank, made.kv_lora_rank, made.rope_type, made.rotary_scaling_factor) == (1536, 512, "yarn", 40)
    assert made.multi_latent_attention and made.qk_layernorm and not made.group_query_attention
    assert (made.ffn_hidden_size, made.mscale, made.mscale_all_dim) == (18432, 1.0, 1.0)


def test_mixtral_mistral_smollm_and_gpt():
    mixtral = flags("mixtral-8x7b")
    assert mixtral.moe_aux_loss_coeff == [0.02] and mixtral.window_size is None and mixtral.rotary_base == 10**6
    assert flags("mistral-7b").window_size == (4095, 0)
    smollm = flags("smollm2-135m")
    assert not smollm.untie_embeddings_and_output_weights and smollm.rotary_base == 100000
    gpt = export_as("megatron", preset("gpt2"), Job(1024, 64), plan(seq_len=1024), 8)
    made = megatron_by_table(gpt.text, 1)
    assert made.position_embedding_type == "learned_absolute" and made.normalization == "LayerNorm"
    assert not made.disable_bias_linear and not made.swiglu and not made.untie_embeddings_and_output_weights
    assert flags("tiny-moe").moe_z_loss_coeff == 0.001 and flags("tiny-moe").moe_layer_freq == [0, 1] * 3


def test_torchtitan_says_what_its_flavor_computes_otherwise():
    assert "rope_scaling=none" in said("torchtitan", dp=2, zero=2)[1]
    same = said("torchtitan", "llama3.1-8b", dp=2, zero=2)[1]
    assert same.count("cannot") == 1 and "cannot leave norms out of weight_decay" in same
    text, missing = said("torchtitan", "deepseek-v3", dp=2, zero=2)
    assert tomllib.loads(text)["model"] == {"name": "deepseek_v3", "flavor": "671B"}
    assert (
        "ends of documents" in missing
        and "norm_eps=1e-06: its flavor has 1e-05" in missing
        and "aux_loss_coef=0.0001: its flavor has 0" in missing
    )
    assert "aux_loss_coef" in said("torchtitan", "qwen3-30b-a3b", dp=2, zero=2)[1]


@pytest.mark.parametrize(
    ("framework", "model", "reason"),
    [
        ("megatron", "gemma2-2b", "soft caps"),
        ("megatron", "gemma3-1b", "rotary base of their own"),
        ("torchtitan", "gpt2", "no flavor"),
        ("torchtitan", "mistral-7b", "no flavor"),
        ("torchtitan", "mixtral-8x7b", "no flavor"),
        ("torchtitan", "smollm2-135m", "no flavor"),
    ],
)
def test_what_would_be_another_model_is_refused(framework, model, reason):
    with pytest.raises(UserError, match="would not train") as problem:
        framework_named(framework, preset(model), JOB)
    assert reason in problem.value.why and "--as deepspeed" in problem.value.fix


def test_scripts_are_told_what_the_model_needs():
    for framework in ("deepspeed", "accelerate"):
        missing = said(framework, "deepseek-v3", dp=2, zero=2)[1]
        assert "cannot move the router's biases (bias_update_rate=0.001)" in missing and "dropout 0" in missing
        assert "cannot add the router's loss (aux_loss_coef=0.0001)" in missing
        mixtral = said(framework, "mixtral-8x7b", dp=2, zero=2)[1]
        assert "output_router_logits=True and router_aux_loss_coef=0.32 in" in mixtral  # 0.02 in 32 layers, 2 experts
        assert "no model like tiny-moe" in said(framework, "tiny-moe", dp=2, zero=2)[1]


def test_transformers_rule_for_the_routers_loss_is_exported_or_said():
    spec = replace(preset("mixtral-8x7b"), aux_loss_rule="transformers")
    made = {name: export_as(name, spec, JOB, plan(dp=2, zero=2), 8) for name in ("megatron", "deepspeed")}
    by_table = megatron_by_table(made["megatron"].text, 2)
    assert by_table.moe_router_load_balancing_type == ["global_aux_loss"] and by_table.moe_aux_loss_coeff == [0.00125]
    assert "--moe-aux-loss-coeff 0.00125" in " ".join(made["megatron"].missing)
    assert "router_aux_loss_coef=0.02 in" in " ".join(made["deepspeed"].missing)
    qwen = replace(preset("qwen3-30b-a3b"), aux_loss_rule="transformers")
    said = " ".join(export_as("torchtitan", qwen, JOB, plan(dp=2, zero=2), 8).missing)
    assert "cannot take aux_loss_coef=0.001: its flavor has 0" in said


def test_how_weights_move_is_exported_or_said():
    rule = UpdateRule(OptimizerConfig(name="adam", betas=(0.8, 0.99), eps=1e-6, weight_decay=0.2), clip=None)
    made = {name: export_as(name, SPEC, JOB, plan(dp=8, zero=2), 8, rule) for name in FRAMEWORKS}
    args = megatron_by_table(made["megatron"].text, 8)
    assert (args.adam_beta1, args.adam_beta2, args.adam_eps, args.weight_decay) == (0.8, 0.99, 1e-6, 0.2)
    assert args.clip_grad == 0 and "cannot add weight decay to the gradient" in " ".join(made["megatron"].missing)
    titan = tomllib.loads(made["torchtitan"].text)
    assert titan["optimizer"] == {"name": "Adam", "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.2}
    assert titan["training"]["max_norm"] == 1e30 and "turn clipping off" in " ".join(made["torchtitan"].missing)
    assert json.loads(made["deepspeed"].text)["gradient_clipping"] == 0
    for text in (" ".join(made["deepspeed"].missing), made["accelerate"].text):
        assert "adam, betas 0.8 and 0.99, eps 1e-06, weight decay 0.2 on matrices only" in text


def test_gradients_are_summed_in_the_plans_format_or_it_is_said():
    text, missing = said("deepspeed", dp=8, zero=2)
    assert json.loads(text)["communication_data_type"] == json.loads(text)["data_types"]["grad_accum_dtype"] == "fp32"
    assert "cannot add up micro-batches in fp32" in said("deepspeed", dp=8)[1] and "add up" not in missing
    assert "cannot reduce gradients in fp32" in said("accelerate", dp=8, zero=2)[1]
    assert "reduce" not in said("accelerate", dp=8)[1]
    assert flags("llama3-8b", dp=8, precision="fp16").accumulate_allreduce_grads_in_fp32
    assert flags("llama3-8b", dp=8, reduce_dtype="bf16").grad_reduce_in_bf16


def test_what_fp8_and_other_optimizers_are_there():
    fp8 = dict(dp=8, zero=3, precision="fp8")
    text, _ = said("torchtitan", "qwen3-30b-a3b", **fp8)
    assert tomllib.loads(text)["quantize"]["linear"]["float8"]["filter_fqns"] == ["output", "router.gate"]
    text, _ = said("torchtitan", "llama3-8b", **fp8, fp8_head=True)
    assert tomllib.loads(text)["quantize"]["linear"]["float8"]["filter_fqns"] == []
    missing = said("megatron", "qwen3-30b-a3b", **fp8, fp8_head=True)[1]
    assert "cannot keep experts in bf16" in missing and "cannot multiply the head in fp8" in missing
    assert "cannot scale fp8 rowwise" in said("accelerate", **fp8)[1]
    for name, more in (("sgd", 8), ("momentum", 4), ("adamw8bit", 6)):
        rule = UpdateRule(OptimizerConfig(name=name))
        for framework in ("megatron", "torchtitan"):
            made = export_as(framework, SPEC, JOB, plan(dp=8, zero=2), 8, rule)
            assert f"states are {more} bytes per parameter larger" in " ".join(made.missing)


YARN = {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_max_seq_len": 4096}


@pytest.mark.parametrize(
    ("model", "seq_len", "changes", "line"),
    [
        ("deepseek-v3", 4096, {}, "rope_scaling=yarn at seq_len=4096: its deepseek_v3 stretches"),
        ("deepseek-v3", 8192, {}, ""),
        ("deepseek-v3", 4096, {"rope_scaling": "none"}, ""),
        ("deepseek-v3", 8192, {"rope_scaling": "none"}, "rope_scaling=none: its deepseek_v3 computes yarn"),
        ("deepseek-v3", 8192, {"rope_attention_factor": 2.0}, "rope_attention_factor=2: its flavor has 0"),
        ("deepseek-v3", 8192, {"bias_update_rate": 0.0}, "bias_update_rate=0: its flavor has 0.001"),
        ("qwen3-8b", 8192, YARN, "rope_scaling=yarn at seq_len=8192: its flavor has"),
        ("llama3.1-8b", 4096, {}, ""),
        ("llama3.1-8b", 4096, {"rope_factor": 4.0}, "rope_factor=4: its flavor has 8"),
    ],
)  # fmt: skip
def test_torchtitan_says_where_its_rotary_positions_or_routers_biases_are_others(model, seq_len, changes, line):
    spec = replace(preset(model), **changes)
    made = export_as("torchtitan", spec, Job(seq_len, 64), plan(dp=2, zero=2, seq_len=seq_len), 8)
    others = [text for text in made.missing if "rope" in text or "bias_update_rate" in text]
    assert len(others) == bool(line) and all(text.startswith(f"cannot take {line}") for text in others), made.missing


def test_every_export_names_its_version_and_whose_times_are_predicted():
    for framework in FRAMEWORKS.values():
        assert any(letter.isdigit() for letter in framework.title)
        assert "not of this framework" in said(framework.name)[1]


def test_printed_json_stays_json_with_its_notes():
    made = export_as("deepspeed", SPEC, JOB, plan(recompute="full"), 8)
    notes = json.loads(made.to_print("title", "more"))["_shardwise"]
    assert notes[:2] == ["title", "more"] and any("gradient_checkpointing" in note for note in notes)


def test_an_unknown_framework_is_answered_with_the_nearest():
    with pytest.raises(UserError, match="deepspead") as problem:
        export_as("deepspead", SPEC, JOB, plan(), 8)
    assert problem.value.fix == "--as deepspeed"
