"""Writes a `ModelSpec` as the config.json that transformers loads. No torch.

Owns the field names that architectures share on the way out. Invariant: what is written is read back with
`spec_from_config` and must give the same function, else it is refused. Read next: `architectures.py` for what each
adds, `config.py`, the way in.
"""

from __future__ import annotations

from typing import Any

from shardwise.errors import UserError
from shardwise.interop.huggingface.architectures import ARCHITECTURES, choose_architecture
from shardwise.interop.huggingface.config import spec_from_config
from shardwise.spec.model import ModelSpec

# Fields that say how to train or what to call the model, not what it computes.
NOT_THE_FUNCTION = ("name", "aux_loss_coef", "aux_loss_rule", "z_loss_coef", "bias_update_rate")
ACTIVATION_OUT = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def config_from_spec(spec: ModelSpec) -> dict[str, Any]:
    kind = choose_architecture(spec)
    config = {"architectures": [ARCHITECTURES[kind].causal_class], "model_type": kind, **_fields(spec, kind)}
    wrong = differences(spec, spec_from_config(config))
    if wrong:
        raise UserError(
            f"{spec.name} has no Hugging Face form",
            why=f"the nearest architecture, {kind}, cannot say "
            + ", ".join(f"{key} = {getattr(spec, key)!r}" for key in wrong),
            fix="export a model with the shape of a supported family, or keep it as a shardwise checkpoint",
        )
    return config


def differences(spec: ModelSpec, other: ModelSpec) -> list[str]:
    """Returns the names of the fields in which two specs compute different functions."""
    idle = set(NOT_THE_FUNCTION)
    if spec.layers == other.layers:
        idle |= {
            "sliding_window",
            "window_from",
            "global_every",
            "rope_local_theta",
            "first_dense_layers",
            "moe_every",
            "ffn",
        }
    if not spec.is_moe:
        idle |= {"num_shared_experts", "router", "norm_topk", "routed_scaling", "num_expert_groups", "topk_groups"}
        idle |= {"experts_per_token", "expert_ffn"}
    if spec.router != "sigmoid-bias":
        idle |= {"num_expert_groups", "topk_groups"}
    if spec.positions == "learned":
        idle |= {name for name in spec.to_dict() if name.startswith("rope_")}
    if spec.rope_scaling != "yarn":
        idle |= {"rope_mscale", "rope_mscale_all_dim", "rope_attention_factor", "rope_beta_fast", "rope_beta_slow"}
    if spec.rope_scaling != "llama3":
        idle |= {"rope_low_freq_factor", "rope_high_freq_factor"}
    if spec.rope_scaling not in ("llama3", "yarn"):
        idle |= {"rope_original_max_seq_len"}
    if spec.rope_scaling == "none":
        idle |= {"rope_factor"}
    ours, theirs = _explicit(spec), _explicit(other)
    return [name for name, value in ours.items() if name not in idle and value != theirs[name]]


def _explicit(spec: ModelSpec) -> dict[str, Any]:
    kinds = {"attention_kind": spec.attention.name, "feedforward_kind": spec.feedforward_kind}
    return spec.to_dict() | kinds | {"query_scale_dim": spec.query_scale_dim or spec.head_dim}


def _fields(spec: ModelSpec, kind: str) -> dict[str, Any]:
    if kind == "gpt2":
        return {
            "n_layer": spec.num_layers,
            "n_embd": spec.hidden,
            "n_head": spec.num_heads,
            "n_inner": spec.ffn,
            "n_positions": spec.max_seq_len,
            "vocab_size": spec.vocab,
            "layer_norm_epsilon": spec.norm_eps,
            "activation_function": ACTIVATION_OUT[spec.activation],
            "tie_word_embeddings": spec.tied,
            "bos_token_id": None,
            "eos_token_id": None,
            # Our models have no dropout, and 0.1 is GPT-2's default.
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    config = {
        "num_hidden_layers": spec.num_layers,
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.expert_ffn if kind == "mixtral" else spec.ffn,
        "vocab_size": spec.vocab,
        "max_position_embeddings": spec.max_seq_len,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied,
        "attention_bias": spec.qkv_bias and kind != "qwen2",
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **_rope(spec, kind),
    }
    config["hidden_activation" if kind.startswith("gemma") else "hidden_act"] = ACTIVATION_OUT[spec.activation]
    if kind != "deepseek_v3":
        config["head_dim"] = spec.head_dim
    return config | ARCHITECTURES[kind].write(spec)


def _rope(spec: ModelSpec, kind: str) -> dict[str, Any]:
    """Returns both spellings: `rope_parameters` for transformers 5, `rope_theta` and `rope_scaling` for version 4 and
    others."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    if spec.rope_scaling != "none":
        scaling = {"rope_type": spec.rope_scaling, "factor": spec.rope_factor}
    if spec.rope_scaling == "llama3":
        scaling["low_freq_factor"] = spec.rope_low_freq_factor
        scaling["high_freq_factor"] = spec.rope_high_freq_factor
    if spec.rope_scaling == "yarn":
        scaling["beta_fast"], scaling["beta_slow"] = spec.rope_beta_fast, spec.rope_beta_slow
        optional = ("mscale", "mscale_all_dim", "attention_factor")
        scaling |= {key: getattr(spec, f"rope_{key}") for key in optional if getattr(spec, f"rope_{key}")}
    if spec.rope_original_max_seq_len and spec.rope_scaling in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = spec.rope_original_max_seq_len
    full = {**scaling, "rope_theta": spec.rope_theta}
    plain = {"rope_theta": spec.rope_theta, "rope_scaling": scaling if spec.rope_scaling != "none" else None}
    if kind != "gemma3_text":
        return {**plain, "rope_parameters": full}
    local_theta = spec.rope_local_theta or spec.rope_theta
    local = {"rope_type": "default", "rope_theta": local_theta}
    parameters = {"full_attention": full, "sliding_attention": local}
    return {**plain, "rope_local_base_freq": local_theta, "rope_parameters": parameters}
