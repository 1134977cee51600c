"""Small decoders of every kind that the spec describes, for the tests of several rooms."""

from __future__ import annotations

import torch

from shardwise.model.decoder import Decoder
from shardwise.model.initialize import initialize
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

SMALL = {"num_layers": 3, "hidden": 32, "num_heads": 4, "num_kv_heads": 2, "ffn": 48, "vocab": 64, "max_seq_len": 64}
VARIANTS: dict[str, ModelSpec] = {
    "llama": preset("tiny").with_overrides(SMALL),
    "window": preset("tiny").with_overrides(SMALL | {"sliding_window": 4}),
    "gpt2": preset("gpt2").with_overrides(SMALL | {"num_kv_heads": 4}),
    "gemma2": preset("gemma2-2b").with_overrides(SMALL | {"head_dim": 8, "sliding_window": 4}),
    "gemma3": preset("gemma3-1b").with_overrides(SMALL | {"head_dim": 8, "sliding_window": 4, "global_every": 3}),
    "moe": preset("tiny-moe").with_overrides(SMALL | {"num_experts": 4}),
    "latent": preset("deepseek-v3").with_overrides(
        SMALL
        | {
            "num_kv_heads": 4,
            "q_lora_rank": 24,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 8,
            "v_head_dim": 10,
            "num_experts": 8,
            "experts_per_token": 2,
            "expert_ffn": 16,
            "num_expert_groups": 4,
            "topk_groups": 2,
            "first_dense_layers": 1,
        }
    ),
}


def make(variant: str, attention: str = "auto", dtype: torch.dtype = torch.float64) -> Decoder:
    model = Decoder(VARIANTS[variant], attention).to(dtype)
    initialize(model, seed=0)
    with torch.no_grad():  # stronger than the first weights, so that a wrong mask shows
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10)
    return model


def some_tokens(length: int = 16) -> torch.Tensor:
    return torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(0))
