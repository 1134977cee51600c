"""Lists the architectures of the Hugging Face world that our decoder computes, one record each: how a config.json is
read and written, and what its attention's tensors are called. No torch.

To add one, write its record at the end of the list. Invariant: a field that would change the computed function is
either represented in the spec or refused by name. Read next: `reader.py` for what they share when read, `config.py` and
`export.py`, which go through the records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardwise.interop.huggingface.reader import Reader, refused
from shardwise.spec.model import ModelSpec


def nothing_else(spec: ModelSpec) -> dict[str, Any]:
    return {}


def projections(spec: ModelSpec) -> dict[str, str]:
    """Returns the names of attention's modules, ours to theirs, as most have them."""
    norms = ("q_norm", "k_norm") if spec.qk_norm else ()
    return {letter: f"{letter}_proj" for letter in "qkvo"} | {norm: norm for norm in norms}


@dataclass(frozen=True)
class Architecture:
    """What one model_type means: how its config is read and written."""

    causal_class: str
    read: Callable[[Reader], dict[str, Any]]
    """Returns its config as fields of a spec."""
    fits: Callable[[ModelSpec], bool]
    """Returns whether a model has the features that tell it from the architectures before it in the list."""
    requires: Mapping[str, Any] = field(default_factory=dict)
    """The fields that must keep the one value we compute."""
    write: Callable[[ModelSpec], dict[str, Any]] = nothing_else
    """Returns the fields of config.json beside those that all have."""
    attention: Callable[[ModelSpec], dict[str, str]] = projections
    """Returns the names of attention's modules, ours to theirs."""
    appends_layers: bool = False
    """Whether checkpoints have layers after the model's last that are no part of it (multi-token prediction)."""


def read_llama(config: Reader) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    return {
        **config.sizes(),
        **config.rope(),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "max_seq_len": config.get("max_position_embeddings", 2048),
        "activation": config.activation(),
        "mlp_bias": bool(config.get("mlp_bias", False)),
        "qkv_bias": bias,
        "out_bias": bias,
    }


def write_llama(spec: ModelSpec) -> dict[str, Any]:
    return {"mlp_bias": spec.mlp_bias}


def read_mistral(config: Reader) -> dict[str, Any]:
    # transformers' default where the key is absent is 4096, but a null means no window.
    windowed = "sliding_window" not in config.config or config.config["sliding_window"] is not None
    if config.config.get("layer_types") is not None:
        raise refused("layer_types", config.config["layer_types"], "Mistral's own class ignores it")
    sizes = config.sizes() | {"num_kv_heads": config.get("num_key_value_heads", 8)}
    return {
        **sizes,
        **config.rope(),
        **config.window([windowed] * sizes["num_layers"], 4096),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "max_seq_len": config.get("max_position_embeddings", 131072),
        "activation": config.activation(),
    }


def write_mistral(spec: ModelSpec) -> dict[str, Any]:
    return {"sliding_window": spec.sliding_window}


def read_qwen2(config: Reader) -> dict[str, Any]:
    return read_qwen(config) | {"qkv_bias": True}


def read_qwen3(config: Reader) -> dict[str, Any]:
    bias = bool(config.get("attention_bias", False))
    head_dim = config.get("head_dim", 128)
    return read_qwen(config) | {"qk_norm": True, "qkv_bias": bias, "out_bias": bias, "head_dim": head_dim}


def read_qwen(config: Reader) -> dict[str, Any]:
    sizes = config.sizes() | {"num_kv_heads": config.get("num_key_value_heads", 32)}
    windowed = bool(config.get("use_sliding_window", False))
    if not windowed and "sliding_attention" in config.get("layer_types", []):
        raise refused("layer_types", "sliding_attention", "use_sliding_window is false, so the window has no size")
    first = config.get("max_window_layers", 28)
    return {
        **sizes,
        **config.rope(),
        **config.window([windowed and index >= first for index in range(sizes["num_layers"])], 4096),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "max_seq_len": config.get("max_position_embeddings", 32768),
        "activation": config.activation(),
    }


def write_qwen(spec: ModelSpec) -> dict[str, Any]:
    return {
        "use_sliding_window": bool(spec.sliding_window),
        "sliding_window": spec.sliding_window or None,
        "max_window_layers": spec.window_from,
        "layer_types": layer_types(spec),
    }


def layer_types(spec: ModelSpec) -> list[str]:
    return ["full_attention" if layer.window is None else "sliding_attention" for layer in spec.layers]


def read_gpt2(config: Reader) -> dict[str, Any]:
    hidden = config.get("n_embd", 768)
    return {
        "num_layers": config.get("n_layer", 12),
        "hidden": hidden,
        "num_heads": config.get("n_head", 12),
        "ffn": config.get("n_inner", 4 * hidden),
        "vocab": config.get("vocab_size", 50257),
        "max_seq_len": config.get("n_positions", 1024),
        "norm": "layer",
        "norm_eps": float(config.get("layer_norm_epsilon", 1e-5)),
        "activation": config.activation("activation_function", "gelu_new"),
        "gated": False,
        "mlp_bias": True,
        "positions": "learned",
        "qkv_bias": True,
        "out_bias": True,
        "tied": bool(config.get("tie_word_embeddings", True)),
    }


def read_gemma(config: Reader) -> dict[str, Any]:
    sizes = config.sizes()
    return {
        **sizes,
        "num_kv_heads": config.get("num_key_value_heads", 4),
        "head_dim": config.get("head_dim", 256),
        "tied": bool(config.get("tie_word_embeddings", True)),
        "activation": config.activation("hidden_activation", "gelu_pytorch_tanh"),
        "norm_plus_one": True,
        "post_norms": True,
        "scale_embedding": True,
        "query_scale_dim": float(config.get("query_pre_attn_scalar", 256)),
    }


def read_gemma2(config: Reader) -> dict[str, Any]:
    fields = read_gemma(config)
    # A null switches capping off, absence means Gemma 2's default.
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **config.config}
    bias = bool(config.get("attention_bias", False))
    return {
        **fields,
        **config.rope(),
        **config.window([(index + 1) % 2 != 0 for index in range(fields["num_layers"])], 4096),
        "max_seq_len": config.get("max_position_embeddings", 8192),
        "attention_softcap": float(caps["attn_logit_softcapping"] or 0.0),
        "logit_softcap": float(caps["final_logit_softcapping"] or 0.0),
        "qkv_bias": bias,
        "out_bias": bias,
    }


def read_gemma3(config: Reader) -> dict[str, Any]:
    fields = read_gemma(config)
    every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", 6))
    bias = bool(config.get("attention_bias", False))
    return {
        **fields,
        **_gemma3_rope(config),
        **config.window([(index + 1) % every != 0 for index in range(fields["num_layers"])], 4096),
        "max_seq_len": config.get("max_position_embeddings", 131072),
        "logit_softcap": float(config.get("final_logit_softcapping", 0.0)),
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
    }


def _gemma3_rope(config: Reader) -> dict[str, Any]:
    """Returns two bases: windowed layers keep a short one, never scaled."""
    parameters = config.get("rope_parameters", {})
    local = parameters.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        raise refused("rope_parameters.sliding_attention", local, "windowed layers have plain rotary positions")
    full = parameters.get("full_attention") or config.get("rope_scaling", {})
    theta = float(full.get("rope_theta") or config.get("rope_theta", 1e6))
    local_theta = float(local.get("rope_theta") or config.get("rope_local_base_freq", 1e4))
    return {**config.scaling(full, theta), "rope_local_theta": local_theta}


def write_gemma(spec: ModelSpec) -> dict[str, Any]:
    scale = spec.query_scale_dim or spec.head_dim
    return {
        "query_pre_attn_scalar": int(scale) if scale == int(scale) else scale,
        "sliding_window": spec.sliding_window or spec.max_seq_len,
        "layer_types": layer_types(spec),
        "final_logit_softcapping": spec.logit_softcap or None,
        "attn_logit_softcapping": spec.attention_softcap or None,
    }


def read_mixtral(config: Reader) -> dict[str, Any]:
    sizes = config.sizes() | {
        "num_kv_heads": config.get("num_key_value_heads", 8),
        "norm_eps": float(config.get("rms_norm_eps", 1e-5)),
    }
    windowed = config.config.get("sliding_window") is not None
    return {
        **sizes,
        **config.rope(default_theta=1e6),
        **config.window([windowed] * sizes["num_layers"], 0),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "max_seq_len": config.get("max_position_embeddings", 131072),
        "activation": config.activation(),
        "num_experts": config.get("num_local_experts", 8),
        "experts_per_token": config.get("num_experts_per_tok", 2),
        "expert_ffn": sizes["ffn"],
        "router": "softmax-topk",
        "norm_topk": True,
        "aux_loss_coef": float(config.get("router_aux_loss_coef", 0.001)),
    }


def write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_local_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "sliding_window": spec.sliding_window or None,
        "router_aux_loss_coef": spec.aux_loss_coef,
    }


def read_qwen3_moe(config: Reader) -> dict[str, Any]:
    sizes = config.sizes() | {"num_kv_heads": config.get("num_key_value_heads", 4)}
    windowed = bool(config.get("use_sliding_window", False))
    dense = list(config.get("mlp_only_layers", []))
    if dense != list(range(len(dense))):
        raise refused("mlp_only_layers", dense, "dense layers come first: 0, 1, ...")
    bias = bool(config.get("attention_bias", False))
    return {
        **sizes,
        **config.rope(),
        **config.window([windowed] * sizes["num_layers"], 4096),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "max_seq_len": config.get("max_position_embeddings", 32768),
        "activation": config.activation(),
        "qk_norm": True,
        "qkv_bias": bias,
        "out_bias": bias,
        "num_experts": config.get("num_experts", config.get("num_local_experts", 128)),
        "experts_per_token": config.get("num_experts_per_tok", 8),
        "expert_ffn": config.get("moe_intermediate_size", 768),
        "first_dense_layers": len(dense),
        "moe_every": config.get("decoder_sparse_step", 1),
        "router": "softmax-topk",
        "norm_topk": bool(config.get("norm_topk_prob", False)),
        "aux_loss_coef": float(config.get("router_aux_loss_coef", 0.001)),
    }


def write_qwen3_moe(spec: ModelSpec) -> dict[str, Any]:
    return {
        "num_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.expert_ffn,
        "decoder_sparse_step": spec.moe_every,
        "mlp_only_layers": list(range(spec.first_dense_layers)),
        "norm_topk_prob": spec.norm_topk,
        "use_sliding_window": bool(spec.sliding_window),
        "sliding_window": spec.sliding_window or None,
        "router_aux_loss_coef": spec.aux_loss_coef,
    }


def read_deepseek_v3(config: Reader) -> dict[str, Any]:
    sizes = {key: value for key, value in config.sizes().items() if key not in ("head_dim", "num_kv_heads")}
    return {
        **sizes,
        **config.rope(),
        "tied": bool(config.get("tie_word_embeddings", False)),
        "max_seq_len": config.get("max_position_embeddings", 4096),
        "activation": config.activation(),
        "rope_interleaved": bool(config.get("rope_interleave", True)),
        "q_lora_rank": config.config.get("q_lora_rank", 1536) or 0,
        "kv_lora_rank": config.get("kv_lora_rank", 512),
        "qk_nope_head_dim": config.get("qk_nope_head_dim", 128),
        "qk_rope_head_dim": config.get("qk_rope_head_dim", 64),
        "v_head_dim": config.get("v_head_dim", 128),
        "num_experts": config.get("n_routed_experts", config.get("num_local_experts", 256)),
        "experts_per_token": config.get("num_experts_per_tok", 8),
        "expert_ffn": config.get("moe_intermediate_size", 2048),
        "num_shared_experts": config.get("n_shared_experts", 1),
        "first_dense_layers": config.get("first_k_dense_replace", 3),
        "router": "sigmoid-bias",
        "norm_topk": bool(config.get("norm_topk_prob", True)),
        "routed_scaling": float(config.get("routed_scaling_factor", 2.5)),
        "num_expert_groups": config.get("n_group", 8),
        "topk_groups": config.get("topk_group", 4),
        "aux_loss_coef": float(config.get("aux_loss_alpha", 0.0001)),
        "bias_update_rate": 0.001,
    }


def write_deepseek_v3(spec: ModelSpec) -> dict[str, Any]:
    return {
        "q_lora_rank": spec.q_lora_rank or None,
        "kv_lora_rank": spec.kv_lora_rank,
        "qk_nope_head_dim": spec.qk_nope_head_dim,
        "qk_rope_head_dim": spec.qk_rope_head_dim,
        "v_head_dim": spec.v_head_dim,
        "rope_interleave": spec.rope_interleaved,
        "n_routed_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.expert_ffn,
        "n_shared_experts": spec.num_shared_experts,
        "first_k_dense_replace": spec.first_dense_layers,
        "norm_topk_prob": spec.norm_topk,
        "routed_scaling_factor": spec.routed_scaling,
        "n_group": spec.num_expert_groups,
        "topk_group": spec.topk_groups,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0,  # no multi-token-prediction module is written
    }


def latent_projections(spec: ModelSpec) -> dict[str, str]:
    low_rank = {"q_down": "q_a_proj", "q_norm": "q_a_layernorm"} if spec.q_lora_rank else {}
    return {
        "q": "q_b_proj" if spec.q_lora_rank else "q_proj",
        "kv_down": "kv_a_proj_with_mqa",
        "kv_norm": "kv_a_layernorm",
        "kv_up": "kv_b_proj",
        "o": "o_proj",
        **low_rank,
    }


NO_BIDIRECTIONAL: dict[str, Any] = {"use_bidirectional_attention": None}
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", read_llama, lambda spec: True, write=write_llama),
    "mistral": Architecture(
        "MistralForCausalLM", read_mistral, lambda spec: spec.sliding_window > 0, write=write_mistral
    ),
    "qwen2": Architecture(
        "Qwen2ForCausalLM", read_qwen2, lambda spec: spec.qkv_bias and not spec.out_bias, write=write_qwen
    ),
    "qwen3": Architecture("Qwen3ForCausalLM", read_qwen3, lambda spec: spec.qk_norm, write=write_qwen),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        read_gpt2,
        lambda spec: spec.positions == "learned",
        {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": None, "add_cross_attention": None},
    ),
    "gemma2": Architecture(
        "Gemma2ForCausalLM",
        read_gemma2,
        lambda spec: spec.norm_plus_one and spec.positions == "rope",
        NO_BIDIRECTIONAL,
        write_gemma,
    ),
    "gemma3_text": Architecture(
        "Gemma3ForCausalLM",
        read_gemma3,
        lambda spec: spec.norm_plus_one and spec.positions == "rope" and spec.qk_norm,
        {**NO_BIDIRECTIONAL, "attn_logit_softcapping": None},
        write_gemma,
    ),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        read_mixtral,
        lambda spec: spec.is_moe and spec.positions == "rope" and not spec.norm_plus_one,
        {"router_jitter_noise": 0.0},
        write_mixtral,
    ),
    "qwen3_moe": Architecture(
        "Qwen3MoeForCausalLM",
        read_qwen3_moe,
        lambda spec: spec.is_moe and spec.positions == "rope" and not spec.norm_plus_one and spec.qk_norm,
        write=write_qwen3_moe,
    ),
    "deepseek_v3": Architecture(
        "DeepseekV3ForCausalLM",
        read_deepseek_v3,
        lambda spec: spec.attention.name == "latent",
        {"attention_bias": None, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        write_deepseek_v3,
        latent_projections,
        appends_layers=True,
    ),
}
"""The architectures by model_type."""


def choose_architecture(spec: ModelSpec) -> str:
    """Returns the one transformers architecture that could hold this model, by its most telling feature."""
    return next(name for name, one in reversed(ARCHITECTURES.items()) if one.fits(spec))
