"""A spec is valid or it is refused with a reason; its counts are arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from shardwise.errors import UserError
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset


def test_unknown_override_suggests_the_right_name() -> None:
    with pytest.raises(UserError) as error:
        preset("tiny").with_overrides({"num_layer": 2})
    assert error.value.fix == "did you mean `num_layers`?"


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        ({"num_layers": "six"}, "num_layers"),
        ({"num_layers": True}, "num_layers"),
        ({"num_layers": 0}, "num_layers"),
        ({"tied": 1}, "tied"),
        ({"norm": "batch"}, "norm"),
        ({"num_kv_heads": 3}, "key-value heads"),
        ({"hidden": 264}, "even"),
        ({"num_experts": 8}, "experts_per_token"),
        ({"num_experts": 8, "experts_per_token": 2, "num_expert_groups": 3}, "groups"),
        ({"kv_lora_rank": 16}, "latent"),
        ({"rope_scaling": "llama3"}, "rope_original_max_seq_len"),
    ],
)
def test_impossible_models_are_refused_by_name(overrides: dict, word: str) -> None:
    with pytest.raises(UserError) as error:
        preset("tiny").with_overrides(overrides)
    assert word in str(error.value)


def test_derived_sizes_follow_an_override_unless_given() -> None:
    wider = preset("tiny").with_overrides({"hidden": 512})
    assert wider.head_dim == 64
    assert preset("gpt2").with_overrides({"num_heads": 24}).num_kv_heads == 24
    assert preset("tiny").with_overrides({"hidden": 512, "head_dim": 32}).head_dim == 32
    assert preset("qwen3-0.6b").with_overrides({"hidden": 512}).head_dim == 128


def test_json_round_trip() -> None:
    for name in ("tiny-moe", "deepseek-v3", "gemma3-1b"):
        spec = preset(name)
        assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_layers_say_where_windows_and_experts_are() -> None:
    assert [layer.is_moe for layer in preset("tiny-moe").layers] == [False, True] * 3
    assert [layer.is_moe for layer in preset("deepseek-v3").layers][:4] == [False, False, False, True]
    gemma = preset("gemma3-1b").layers
    assert [layer.window for layer in gemma[:7]] == [512] * 5 + [None, 512]
    assert [layer.rope_theta for layer in gemma[4:6]] == [1e4, 1e6]


def test_flops_follow_the_textbook_formula_for_a_dense_causal_model() -> None:
    spec, seq_len = preset("llama2-7b"), 4096
    matmul = 6 * (spec.num_parameters - spec.vocab * spec.hidden)
    assert spec.flops_per_token(seq_len) == matmul + 6 * spec.num_layers * spec.hidden * seq_len


def test_tied_embeddings_still_cost_the_head_matmul() -> None:
    tied = preset("smollm2-135m")
    untied = tied.with_overrides({"tied": False})
    assert tied.flops_per_token(2048) == untied.flops_per_token(2048)


def test_a_window_bounds_the_attention_cost() -> None:
    spec = preset("mistral-7b")
    assert spec.flops_per_token(4096) == spec.with_overrides({"sliding_window": 0}).flops_per_token(4096)
    layer, window, seq_len = spec.layers[0], 4096, 32768
    met = sum(min(position + 1, window) for position in range(seq_len)) / seq_len
    assert spec.attention_context(layer, seq_len) == pytest.approx(met, rel=1e-3)


def test_latent_attention_counts_query_and_value_widths() -> None:
    spec = preset("deepseek-v3")
    attention = spec.flops_per_token(4096) - spec.flops_per_token(2048)
    assert attention == 61 * 6 * 128 * (192 + 128) * 1024


@pytest.mark.parametrize(
    "module",
    [
        "spec.model",
        "spec.presets",
        *(f"interop.huggingface.{name}" for name in ("config", "export", "names", "directory", "load_save")),
    ],
)
def test_importing_does_not_import_torch(module: str) -> None:
    code = f"import sys, shardwise.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
