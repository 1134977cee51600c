"""Says a model in flags of Megatron-LM, or why it would be another model there. No torch. Part of megatron.py."""

from __future__ import annotations

from itertools import groupby

from shardwise.interop.frameworks.framework import NOT_OURS
from shardwise.spec.layers import AttentionKind, ExpertsKind, FeedForwardKind, LatentAttentionKind
from shardwise.spec.model import ModelSpec

Flags = list[tuple[str, object]]

KNOWN_KINDS = (AttentionKind, LatentAttentionKind, FeedForwardKind, ExpertsKind)
"""Kinds of layers that the flags below say whole; another is refused."""

LLAMA3_SCALING = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_max_seq_len": 8192}
"""What its --use-rope-scaling assumes beside the factor."""

YARN_ASSUMED = {"rope_original_max_seq_len": 4096, "rope_beta_fast": 32.0, "rope_beta_slow": 1.0}
"""What its YaRN assumes for latent attention, which has no flags."""


def refused_model(spec: ModelSpec) -> list[str]:
    """Returns what the model has that Megatron-LM has not, by which it would be another model."""
    if not spec.is_ours:
        return [NOT_OURS]
    biases = (spec.qkv_bias, spec.out_bias, spec.mlp_bias)
    found = {
        "no norms behind attention and feed-forward (post_norms)": spec.post_norms,
        "no soft caps of attention or logits": bool(spec.attention_softcap or spec.logit_softcap),
        "no embedding multiplied by sqrt(hidden)": spec.scale_embedding,
        "no scale of queries other than the head's size": spec.query_scale_dim not in (0.0, float(spec.head_dim)),
        "no rotary base of their own for windowed layers": bool(spec.sliding_window and spec.rope_local_theta),
        f"no {spec.activation} between {'gate and up' if spec.gated else 'two matrices'}": not _has_activation(spec),
        "no biases in some linear layers only, but for query, key and value": biases
        not in ((True, True, True), (False, False, False), (True, False, False)),
        f"no rope_scaling={spec.rope_scaling} with these factors": not _has_scaling(spec),
        "no fractions in --rotary-base": spec.rope_theta != int(spec.rope_theta),
        "no sigmoid router whose weights are not made to sum to 1": spec.router == "sigmoid-bias"
        and not spec.norm_topk,
        "no scaled weights of a softmax router that sum to 1": spec.router != "sigmoid-bias"
        and spec.norm_topk
        and spec.routed_scaling != 1.0,
    }
    strange = {layer.feedforward.name for layer in spec.layers if type(layer.feedforward) not in KNOWN_KINDS}
    strange |= set() if type(spec.attention) in KNOWN_KINDS else {spec.attention.name}
    found |= {f"no layers of the kind {name}": True for name in sorted(strange)}
    return [reason for reason, is_so in found.items() if is_so]


def _has_activation(spec: ModelSpec) -> bool:
    return spec.activation == "silu" if spec.gated else spec.activation in ("gelu_tanh", "gelu")


def _has_scaling(spec: ModelSpec) -> bool:
    if spec.rope_scaling == "none":
        return True
    if spec.rope_scaling == "llama3":
        return all(getattr(spec, name) == value for name, value in LLAMA3_SCALING.items())
    if spec.rope_scaling == "yarn":
        return spec.kv_lora_rank > 0 and all(getattr(spec, name) == value for name, value in YARN_ASSUMED.items())
    return False


def model_flags(spec: ModelSpec, tp: int) -> tuple[Flags, list[str]]:
    """Returns the model's flags, and what they cannot say."""
    missing: list[str] = []
    flags: Flags = [
        ("num-layers", spec.num_layers),
        ("hidden-size", spec.hidden),
        ("num-attention-heads", spec.num_heads),
        ("ffn-hidden-size", spec.ffn),
        ("vocab-size", spec.vocab),
        ("make-vocab-size-divisible-by", 1),
        ("untie-embeddings-and-output-weights", not spec.tied),
        ("normalization", "RMSNorm" if spec.norm == "rms" else "LayerNorm"),
        ("norm-epsilon", f"{spec.norm_eps:g}"),
        ("apply-layernorm-1p", spec.norm_plus_one),
        ("attention-dropout", "0.0"),
        ("hidden-dropout", "0.0"),
        ("swiglu", spec.gated),
        ("disable-bias-linear", not spec.mlp_bias),
        ("add-qkv-bias", spec.qkv_bias and not spec.mlp_bias),
        ("qk-layernorm", spec.qk_norm or spec.kv_lora_rank > 0),
    ]
    if spec.vocab % tp:
        missing.append(
            f"cannot split {spec.vocab} rows over {tp} ranks: it pads the vocabulary to {-(-spec.vocab // tp) * tp}"
        )
    if not spec.gated and spec.activation == "gelu":
        flags.append(("no-bias-gelu-fusion", True))  # its fused kernel is the tanh approximation
    elif not spec.gated and not spec.mlp_bias:
        missing.append("cannot approximate GELU by tanh without biases: it computes the exact GELU")
    _attention(flags, spec)
    _positions(flags, spec)
    _windows(flags, spec)
    if spec.is_moe:
        _experts(flags, missing, spec)
    return flags, missing


def _attention(flags: Flags, spec: ModelSpec) -> None:
    if spec.kv_lora_rank > 0:
        flags += [
            ("multi-latent-attention", True),
            *([("q-lora-rank", spec.q_lora_rank)] if spec.q_lora_rank else []),
            ("kv-lora-rank", spec.kv_lora_rank),
            ("qk-head-dim", spec.qk_nope_head_dim),
            ("qk-pos-emb-head-dim", spec.qk_rope_head_dim),
            ("v-head-dim", spec.v_head_dim),
            ("kv-channels", spec.v_head_dim),
        ]
        return
    if spec.num_kv_heads != spec.num_heads:
        flags += [("group-query-attention", True), ("num-query-groups", spec.num_kv_heads)]
    flags.append(("kv-channels", spec.head_dim))


def _positions(flags: Flags, spec: ModelSpec) -> None:
    if spec.positions == "learned":
        flags.append(("position-embedding-type", "learned_absolute"))
        return
    flags += [("position-embedding-type", "rope"), ("rotary-base", int(spec.rope_theta)), ("rotary-percent", "1.0")]
    if spec.rope_scaling == "llama3":
        flags += [("use-rope-scaling", True), ("rope-scaling-factor", f"{spec.rope_factor:g}")]
    elif spec.rope_scaling == "yarn":
        flags += [
            ("rope-type", "yarn"),
            ("rotary-scaling-factor", f"{spec.rope_factor:g}"),
            ("mscale", f"{spec.rope_mscale or 1.0:g}"),
            ("mscale-all-dim", f"{spec.rope_mscale_all_dim:g}"),
        ]
    elif spec.kv_lora_rank > 0:
        flags.append(("rope-type", "rope"))


def _windows(flags: Flags, spec: ModelSpec) -> None:
    """Adds sliding windows. Its pair counts the tokens to the left and to the right, without the token itself."""
    if not spec.sliding_window:
        return
    flags.append(("window-size", f"{spec.sliding_window - 1},0"))
    windowed = [int(layer.window is not None) for layer in spec.layers]
    if not all(windowed):
        flags.append(("window-attn-skip-freq", _runs(windowed)))


def _experts(flags: Flags, missing: list[str], spec: ModelSpec) -> None:
    flags += [
        ("num-experts", spec.num_experts),
        ("moe-router-topk", spec.experts_per_token),
        ("moe-ffn-hidden-size", spec.expert_ffn),
        ("moe-layer-freq", _runs([int(layer.is_moe) for layer in spec.layers])),
        ("moe-token-dispatcher-type", "alltoall"),
        ("moe-grouped-gemm", True),
        ("moe-router-dtype", "fp32"),
    ]
    if spec.num_shared_experts:
        flags.append(("moe-shared-expert-intermediate-size", spec.num_shared_experts * spec.expert_ffn))
    if spec.router == "sigmoid-bias":
        flags += [
            ("moe-router-score-function", "sigmoid"),
            ("moe-router-enable-expert-bias", True),
            ("moe-router-bias-update-rate", f"{spec.bias_update_rate:g}"),
        ]
    else:
        flags.append(("moe-router-score-function", "softmax"))
        flags.append(("moe-router-pre-softmax", spec.router == "softmax-topk" and not spec.norm_topk))
    if spec.routed_scaling != 1.0:
        flags.append(("moe-router-topk-scaling-factor", f"{spec.routed_scaling:g}"))
    if spec.num_expert_groups > 1:
        flags += [("moe-router-num-groups", spec.num_expert_groups), ("moe-router-group-topk", spec.topk_groups)]
    kind, coef = "seq_aux_loss", spec.aux_loss_coef
    if spec.needs_counts_first:
        # Per layer it is 1 where the load is even, over all layers together the experts per token.
        kind, coef = "global_aux_loss", coef * spec.experts_per_token / sum(layer.is_moe for layer in spec.layers)
        missing.append(
            "cannot take aux_loss_rule=transformers, one loss over all layers of a step: each layer has its own there, "
            f"over the step so far, which pulls as hard with --moe-aux-loss-coeff {coef:g}"
        )
    flags.append(("moe-router-load-balancing-type", kind if coef else "none"))
    if coef:
        flags.append(("moe-aux-loss-coeff", f"{coef:g}"))
    if spec.z_loss_coef:
        flags.append(("moe-z-loss-coeff", f"{spec.z_loss_coef:g}"))


def _runs(marks: list[int]) -> str:
    """Returns a list of zeros and ones as the expression that its flags take."""
    return "'" + "+".join(f"[{mark}]*{len(list(run))}" for mark, run in groupby(marks)) + "'"
