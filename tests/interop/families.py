"""Small random models of every supported family: transformers' config class and the options that matter for it."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

SIZES = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
LLAMA3_ROPE = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
YARN_ROPE = dict(
    rope_type="yarn", factor=4.0, original_max_position_embeddings=2048, mscale=1.0, mscale_all_dim=0.7, beta_fast=8
)
DEEPSEEK = SIZES | dict(
    num_key_value_heads=4,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    moe_intermediate_size=24,
    kv_lora_rank=16,
    q_lora_rank=24,
    qk_rope_head_dim=8,
    qk_nope_head_dim=12,
    v_head_dim=10,
    num_nextn_predict_layers=0,
)

# name: (config class, its arguments)
FAMILIES = {
    "llama2": (transformers.LlamaConfig, SIZES | dict(num_key_value_heads=4)),
    "llama3": (transformers.LlamaConfig, SIZES | dict(rope_theta=500000.0)),
    "llama3.1": (transformers.LlamaConfig, SIZES | dict(rope_theta=500000.0, rope_scaling=LLAMA3_ROPE)),
    "llama-linear-rope-biases": (
        transformers.LlamaConfig,
        SIZES
        | dict(rope_scaling=dict(rope_type="linear", factor=4.0), attention_bias=True, mlp_bias=True, head_dim=12),
    ),
    "smollm2-tied": (transformers.LlamaConfig, SIZES | dict(tie_word_embeddings=True, rope_theta=100000.0)),
    "mistral": (transformers.MistralConfig, SIZES | dict(sliding_window=5)),
    "mistral-no-window": (transformers.MistralConfig, SIZES | dict(sliding_window=None)),
    "qwen2": (transformers.Qwen2Config, SIZES),
    "qwen2-window": (
        transformers.Qwen2Config,
        SIZES | dict(use_sliding_window=True, sliding_window=4, max_window_layers=1, tie_word_embeddings=True),
    ),
    "qwen3": (transformers.Qwen3Config, SIZES | dict(head_dim=16)),
    "qwen3-yarn": (transformers.Qwen3Config, SIZES | dict(head_dim=16, rope_scaling=YARN_ROPE, attention_bias=True)),
    "gpt2": (
        transformers.GPT2Config,
        dict(vocab_size=96, n_embd=32, n_layer=3, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0),
    ),
    "gemma2": (
        transformers.Gemma2Config,
        SIZES | dict(head_dim=16, sliding_window=5, query_pre_attn_scalar=24, attn_logit_softcapping=2.0),
    ),
    "gemma3": (
        transformers.Gemma3TextConfig,
        SIZES | dict(head_dim=16, sliding_window=5, num_hidden_layers=7, query_pre_attn_scalar=16),
    ),
    "gemma3-scaled": (
        transformers.Gemma3TextConfig,
        SIZES
        | dict(
            head_dim=16,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            sliding_window=4,
            final_logit_softcapping=20.0,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
    ),
    "mixtral": (transformers.MixtralConfig, SIZES | dict(num_local_experts=4)),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        SIZES | dict(head_dim=16, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True),
    ),
    "qwen3-moe-mixed": (
        transformers.Qwen3MoeConfig,
        SIZES
        | dict(
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=False,
            decoder_sparse_step=2,
        ),
    ),
    "deepseek-v3": (transformers.DeepseekV3Config, DEEPSEEK | dict(n_shared_experts=2)),
    "deepseek-v3-yarn": (transformers.DeepseekV3Config, DEEPSEEK | dict(rope_scaling=YARN_ROPE, rope_interleave=False)),
    "deepseek-v3-no-q-lora": (
        transformers.DeepseekV3Config,
        DEEPSEEK | dict(q_lora_rank=None, n_group=1, topk_group=1),
    ),
}


def make_theirs(name: str) -> torch.nn.Module:
    """transformers' model with every parameter random: no zero bias and no unit norm hides a mistake."""
    config_class, arguments = FAMILIES[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config_class(**arguments), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer) * 0.1)
    return model.eval()
