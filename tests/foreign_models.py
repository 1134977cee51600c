"""Small models that our decoder does not describe, as directories that transformers has written. Random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

SIZES = {"vocab_size": 256, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
ENDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
KINDS: dict[str, dict[str, Any]] = {
    # rotary positions on a part of each head, attention beside the feed-forward part, untied
    "gpt_neox": {**SIZES, **ENDS, "intermediate_size": 50, "max_position_embeddings": 64},
    # learned positions, tied, dropout in its config
    "opt": {**SIZES, **ENDS, "ffn_dim": 50, "word_embed_proj_dim": 24, "max_position_embeddings": 64, "dropout": 0.3},
    # no positions at all but a bias by distance, tied, other names for its sizes
    "bloom": {**ENDS, "vocab_size": 256, "hidden_size": 24, "n_layer": 3, "n_head": 4},
}
OTHERS: dict[str, dict[str, Any]] = {
    # no attention: what it remembers is a state
    # fp64 is not possible: it asks for a number that no fp32 can hold
    "xglm": {**ENDS, "vocab_size": 256, "d_model": 24, "num_layers": 3, "attention_heads": 4, "ffn_dim": 50},
    # layers of two kinds by a list, mixtures of experts
    "gpt_oss": {
        **SIZES,
        **ENDS,
        "intermediate_size": 20,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "mamba": {**ENDS, "vocab_size": 256, "hidden_size": 24, "num_hidden_layers": 3, "state_size": 4},
}

HYBRID = {**SIZES, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
          "intermediate_size": 40}  # fmt: skip
ODD: dict[str, dict[str, Any]] = {
    # a list of sizes, one for each layer, and embeddings of its own for each
    "gemma3n_text": {
        **HYBRID, "head_dim": 16, "intermediate_size": [40, 48], "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"], "laurel_rank": 4, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 256, "num_kv_shared_layers": 0,
    },
    # a router's bias that transformers keeps in fp32 whatever is asked for
    "ernie4_5_moe": {**HYBRID, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2},
    # divides its weights in place when it is not in training mode
    "rwkv": {**HYBRID, "num_hidden_layers": 7, "attention_hidden_size": 32},
    # infinity in their config, which JSON does not have
    "mamba2": {**HYBRID, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8},
    "bamba": {**HYBRID, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,
              "attn_layer_indices": [1]},
    "falcon_h1": {**HYBRID, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_n_groups": 1,
                  "mamba_d_state": 8},
    "granitemoehybrid": {**HYBRID, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8,
                         "num_local_experts": 0, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 40},
}  # fmt: skip
LLAMA = {**HYBRID, "max_position_embeddings": 16}
UNKNOWN_TO_OURS: dict[str, tuple[str, dict[str, Any]]] = {
    # an architecture that our decoder knows, with an option that it lacks
    "longrope": ("llama", {**LLAMA, "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
        "original_max_position_embeddings": 8, "factor": 2.0}}),
    "dynamic": ("llama", {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "partial": ("llama", {**LLAMA, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}),
}  # fmt: skip

MODULES = ["transformers.models.auto.modeling_auto", "transformers.models.gpt_neox.modeling_gpt_neox"]
"""What every rank imports that has such a model, for seconds: `ranks.preload(*MODULES)` does it for all of them."""


def write_model(kind: str, directory: Path, seed: int = 0) -> Path:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    model_type, values = UNKNOWN_TO_OURS.get(kind) or (kind, (KINDS | OTHERS | ODD)[kind])
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**values)).save_pretrained(directory)
    return directory
