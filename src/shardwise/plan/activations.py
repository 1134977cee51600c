"""What one forward pass keeps for its backward pass, counted operation by operation. No torch here.

Numbers per token, without recomputation and with fused attention. A norm keeps its input, the normalised values and its
output; a projection keeps its input (the norm's output, already counted); attention keeps q, k, v, its output and one number
per head. A test compares the count with what torch really saves, family by family.

With tensor parallelism `spec` is one rank's slice of the model (rank_share.py): what a region computes shrinks with it. What
lies outside of regions (the norms' inputs and normalised values) shrinks only with sequence parallelism, by `token_parts`; the
input of a region is gathered, so each rank keeps all of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from shardwise.model.spec import LayerSpec, ModelSpec

MAX_LOGITS_BYTES = 256 * 2**20  # model/loss.py computes larger logits in chunks and again in backward


def activation_bytes(spec: ModelSpec, num_sequences: int, seq_len: int, bytes_per_number: int) -> int:
    """Bytes that `num_sequences` leave behind in one micro-batch of the whole model."""
    layers = layer_activations(spec, spec.layers, seq_len)
    return num_sequences * seq_len * layers * bytes_per_number + head_activation_bytes(
        spec, num_sequences * seq_len, bytes_per_number
    )


def layer_activations(
    spec: ModelSpec, layers: Sequence[LayerSpec], seq_len: int, token_parts: int = 1, routed_parts: int = 1
) -> int:
    """Numbers per token that these layers keep. `seq_len`: keys whose scores are kept where no fused kernel does without; a
    ring computes them again, so for it 0. `routed_parts`: ranks that share the tokens while they are routed."""
    return sum(_layer(spec, layer, seq_len, token_parts, routed_parts) for layer in layers)


def exchanged_activations(spec: ModelSpec, layers: Sequence[LayerSpec]) -> int:
    """What Ulysses keeps beside that. By a fused kernel: attention's output twice, by heads for its own backward and by tokens for
    the projection after it; latent attention cuts the second. By definition: keys and values before heads are repeated, because they
    arrive in one message with the queries."""
    if spec.attention_softcap:
        return len(layers) * 2 * spec.num_kv_heads * spec.head_dim
    return 0 if spec.is_latent else len(layers) * spec.num_heads * spec.head_dim


def head_activation_bytes(spec: ModelSpec, num_tokens: int, bytes_per_number: int, token_parts: int = 1) -> int:
    """The last norm and the logits."""
    logit_bytes = max(4, bytes_per_number)
    logits = min(num_tokens * spec.vocab * logit_bytes, MAX_LOGITS_BYTES * logit_bytes // 4)
    return num_tokens * _norm(spec, spec.hidden, token_parts) * bytes_per_number + logits


def _layer(spec: ModelSpec, layer: LayerSpec, seq_len: int, token_parts: int, routed_parts: int) -> int:
    norms = 2 * _norm(spec, spec.hidden, token_parts) + (4 * spec.hidden // token_parts if spec.post_norms else 0)
    attention = _latent_attention(spec) if spec.is_latent else _attention(spec)
    if spec.attention_softcap:  # no fused kernel: scaled, capped and masked scores and the softmax, head by head
        attention += 4 * spec.num_heads * seq_len
    return norms + attention + (_experts(spec, routed_parts) if layer.is_moe else _feedforward(spec, layer.ffn))


def _norm(spec: ModelSpec, width: int, token_parts: int) -> int:
    """Its input and normalised values (LayerNorm: its input), and its output, which is what the next region gathers."""
    return (2 if spec.norm == "rms" else 1) * width // token_parts + width


def _attention(spec: ModelSpec) -> int:
    queries, keys = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    normed = 2 * (queries + keys) if spec.qk_norm else 0
    return queries + 2 * keys + normed + queries + spec.num_heads


def _latent_attention(spec: ModelSpec) -> int:
    queries, values = spec.num_heads * spec.head_dim, spec.num_heads * spec.v_head_dim
    latents = 3 * (spec.q_lora_rank + spec.kv_lora_rank) + spec.qk_rope_head_dim
    return latents + 4 * queries + values + spec.num_heads  # q, k, values padded to q's width, padded output


def _feedforward(spec: ModelSpec, width: int) -> int:
    return (4 if spec.gated else 2) * width  # gate, up, activated gate, product


def _experts(spec: ModelSpec, routed_parts: int) -> int:
    """At even load. A rank with some experts has their whole width, but only its share of the copies: as many numbers as a slice."""
    copies = 3 * spec.hidden * spec.experts_per_token + 4 * spec.num_experts  # sorted, results, weighted; the router
    routed = spec.experts_per_token * _feedforward(spec, spec.expert_ffn)
    return copies // routed_parts + routed + _feedforward(spec, spec.expert_ffn * spec.num_shared_experts)


def segments(mode: str, layers: range) -> list[range]:
    """Which neighbouring layers of a stage are computed again together, by their number in the model."""
    if mode == "full":
        mode = "every-1"
    if mode.startswith("every-"):
        return [range(index, index + 1) for index in layers if index % int(mode.removeprefix("every-")) == 0]
    if mode != "sqrt":
        return []
    count = max(1, round(math.sqrt(len(layers))))
    starts = [layers.start + len(layers) * number // count for number in range(count + 1)]
    return [range(start, stop) for start, stop in pairwise(starts)]
