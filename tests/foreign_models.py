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

MODULES = ["transformers.models.auto.modeling_auto", "transformers.models.gpt_neox.modeling_gpt_neox"]
"""What every rank imports that has such a model, for seconds: `ranks.preload(*MODULES)` does it for all of them."""


def write_model(kind: str, directory: Path, seed: int = 0) -> Path:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**(KINDS | OTHERS)[kind])).save_pretrained(directory)
    return directory
