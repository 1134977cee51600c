"""What one forward pass keeps for its backward pass, counted operation by operation. No torch here.

Elements per token, with fused attention; what each mode of recomputation keeps of them is `kept_activations`. A norm
keeps its input, the normalised values and its output; a projection keeps its input (the norm's output, already
counted); attention keeps q, k, v, its output and one element per head. A compiled block keeps what its partitioner does
not make again in backward: inputs of matmuls, what attention wants, and where norms and sums begin. Tests compare the
count with what torch really saves, family by family, plain and compiled.

Fused matmuls (`Stack.side_by_side`) keep two things more. v is a view of the matmul's result, so all of that stays
beside the rotated q and k. The weights are put side by side anew in every pass, and backward needs that copy: it does
not grow with tokens, so it is divided by them.

With tensor parallelism `spec` is one rank's slice of the model (rank_share.py): what a region computes shrinks with it.
What lies outside of regions (the norms' inputs and normalised values) shrinks only with sequence parallelism, by
`token_parts`; the input of a region is gathered, so each rank keeps all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from shardwise.plan.prediction.stack import OURS, Stack
from shardwise.spec.fp8 import gains
from shardwise.spec.layers import FeedForwardKind
from shardwise.spec.logits import CUDA_TIMES, MAX_LOGITS_BYTES
from shardwise.spec.model import LayerSpec, ModelSpec
from shardwise.spec.recompute import recompute_of, segments


class TokenShare(NamedTuple):
    """The part of a micro-batch's tokens that a rank has while it computes its layers."""

    seq_len: int  # keys whose scores are kept where no fused kernel does without; a ring computes them again: 0
    token_parts: int = 1  # ranks that share the tokens outside of tensor-parallel regions
    routed_parts: int = 1  # ranks that share the tokens while they are routed
    exchanged: bool = False  # attention as Ulysses does it
    load: float = 1.0  # tokens' copies that arrive at this rank's experts, over the mean of all ranks
    size: int = 4  # bytes of an element
    tokens: int = 0  # of a micro-batch on this rank, to divide fused weights by; 0 leaves these out


def layer_activations(
    spec: ModelSpec, layers: Sequence[LayerSpec], share: TokenShare, stack: Stack = OURS, selective: bool = False
) -> int:
    """Returns the elements per token that these layers keep. A mask is one for all rows; it is counted as of one."""
    kinds = Counter((layer.feedforward, layer.ffn) for layer in layers)
    routed = sum(n for (kind, _), n in kinds.items() if kind.has_experts)
    count = _selected if selective else _layer
    found = sum(n * count(spec, *kind, share, stack) for kind, n in kinds.items())
    found += len(layers) * _exchanged(spec) if share.exchanged else 0
    if share.load > 1:
        per_width = 2 if selective else 4
        per_layer = spec.experts_per_token * (per_width * spec.expert_ffn + 2 * spec.hidden // share.routed_parts)
        found += int((share.load - 1) * per_layer * routed)
    if selective and stack.compiled:  # all else that is neither a matmul nor attention is made again
        return found
    if not stack.knows_masks and not spec.attention_softcap:
        # The mask as elements, and what heads are repeated for it.
        masked = sum(layer.window is not None and layer.window < share.seq_len for layer in layers)
        repeated = 0 if selective else 2 * (spec.num_heads - spec.num_kv_heads) * spec.head_dim
        if stack.side_by_side and not selective and spec.num_heads > spec.num_kv_heads:
            repeated -= _beside_view(spec, stack)  # a repeated v is no view
        found += masked * (share.seq_len + repeated)
    if stack.side_by_side and share.tokens:
        found += sum(n * -(-_fused_weights(spec, *kind, stack) // share.tokens) for kind, n in kinds.items())
    if stack.wide_router and share.size < 4:  # its input in fp32, and as it came where others read that too
        more = 4 // share.size - (0 if spec.num_shared_experts else 1)
        found += routed * more * spec.hidden // share.routed_parts
    return found


def _exchanged(spec: ModelSpec) -> int:
    """Returns the elements per token that Ulysses keeps of a layer beside that. By a fused kernel: attention's output
    twice, by heads for its own backward and by tokens for the projection after it; who pads values cuts the second. By
    definition: keys and values before heads are repeated, because they arrive in one collective with the queries."""
    if spec.attention_softcap:
        return 2 * spec.num_kv_heads * spec.head_dim
    return 0 if spec.attention.pads_values else spec.num_heads * spec.head_dim


def head_activation_bytes(
    spec: ModelSpec, num_tokens: int, bytes_per_element: int, token_parts: int = 1, stack: Stack = OURS
) -> int:
    """Returns the bytes that the last norm and the logits of `num_tokens` keep for backward."""
    norm = last_norm_bytes(spec, num_tokens, bytes_per_element, token_parts, stack)
    times = 2 if spec.logit_softcap else 1  # before and after the cap
    return norm + times * logit_bytes(spec, num_tokens, bytes_per_element)


def last_norm_bytes(
    spec: ModelSpec, num_tokens: int, bytes_per_element: int, token_parts: int = 1, stack: Stack = OURS
) -> int:
    return num_tokens * _norm(spec, spec.hidden, token_parts, stack) * bytes_per_element


def logit_bytes(spec: ModelSpec, num_tokens: int, bytes_per_element: int) -> int:
    """Returns the bytes of the logits of one chunk, in fp32 or wider."""
    size = max(4, bytes_per_element)
    return min(num_tokens * spec.vocab * size, MAX_LOGITS_BYTES * size // 4)


def has_chunks(num_logits: int) -> bool:
    """Returns whether so many logits are computed in chunks."""
    return 4 * num_logits > MAX_LOGITS_BYTES


def fused_chunks(num_logits: int, bytes_per_element: int, device: str) -> int:
    """Returns the number of chunks of a fused loss; all are of one size."""
    if device == "cuda":
        return -(-num_logits * bytes_per_element // (CUDA_TIMES * MAX_LOGITS_BYTES))
    return -(-num_logits * 4 // MAX_LOGITS_BYTES)


def _layer(spec: ModelSpec, kind: FeedForwardKind, ffn: int, share: TokenShare, stack: Stack) -> int:
    seq_len, token_parts = share.seq_len, share.token_parts
    norms = 2 * _norm(spec, spec.hidden, token_parts, stack)
    if spec.post_norms:  # compiled: two inputs more, and the sum after the first is made again
        norms += (1 if stack.compiled else 4) * spec.hidden // token_parts
    attention = spec.attention.kept(spec) + _beside_view(spec, stack)
    if spec.attention_softcap and stack.compiled:  # scores as they were multiplied and their softmax; repeated heads
        attention = 4 * spec.num_heads * spec.head_dim + 2 * spec.num_heads * (1 + seq_len)
    elif spec.attention_softcap:  # no fused kernel: scaled, capped and masked scores and the softmax, head by head
        attention += 4 * spec.num_heads * seq_len
    one_kernel = stack.fused_activation or stack.compiled or _is_one(spec, stack)
    rest = kind.kept(spec, ffn, one_kernel, share.routed_parts)
    if stack.compiled and stack.fp8_least and spec.attention.fused:
        rest -= _made_again(spec, kind, ffn, token_parts, stack)
    return norms + attention + rest + stack.more_kept(spec, seq_len, token_parts)


def _made_again(spec: ModelSpec, kind: FeedForwardKind, ffn: int, token_parts: int, stack: Stack) -> int:
    """Returns the elements per token of matmuls' inputs that a compiled block keeps in 16 bits and not in eight:
    quantizing is cheap, so backward goes back to what they are made from. An operation of our own makes its result
    once, which is kept as quantized. What is gathered for a region is not made again."""

    def narrow(outputs: int, inputs: int) -> bool:
        return gains(outputs, inputs, stack.fp8_least)

    heads = (spec.num_heads, spec.num_kv_heads)
    smallest = sum(heads) + heads[1] if "qkv" in stack.side_by_side else heads[1]
    normed = narrow(smallest * spec.head_dim, spec.hidden)
    width = kind.dense_width(spec, ffn)
    wide = 2 * width if "gate up" in stack.side_by_side and spec.gated else width
    again = (normed + (not kind.has_experts and narrow(wide, spec.hidden))) * (token_parts == 1) * spec.hidden
    if narrow(spec.hidden, width):
        again += width // 2 if _is_one(spec, stack) else width
    return again


def _norm(spec: ModelSpec, width: int, token_parts: int, stack: Stack) -> int:
    """Returns the elements per token that a norm keeps: its input and normalised values (LayerNorm: its input), and its
    output, which is what the next region gathers."""
    kept = width if stack.holds_gathered else width // token_parts
    return (2 if spec.norm == "rms" else 1) * width // token_parts + kept


def _beside_view(spec: ModelSpec, stack: Stack) -> int:
    """Returns the elements per token that v keeps there by being a view of the fused matmul: q and k as they were
    multiplied. Query norms keep these anyway, and without rotation they are what attention reads."""
    is_view = "qkv" in stack.side_by_side and spec.attention.fused and not spec.attention_softcap
    if not is_view or spec.qk_norm or spec.positions != "rope":
        return 0
    return (spec.num_heads + spec.num_kv_heads) * spec.head_dim


def _fused_weights(spec: ModelSpec, kind: FeedForwardKind, ffn: int, stack: Stack) -> int:
    """Returns the elements of one layer's weights that are fused. Experts' matmuls are not, but for the shared one."""
    rows = 0
    if "qkv" in stack.side_by_side and spec.attention.fused:
        rows += (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    if "gate up" in stack.side_by_side and spec.gated:
        rows += 2 * kind.dense_width(spec, ffn)
    return rows * spec.hidden


def _is_one(spec: ModelSpec, stack: Stack) -> bool:
    """Returns whether activation and gating of fused gate and up are one operation of our own (kernels/gated.py)."""
    return "gate up" in stack.side_by_side and spec.activation == "silu"


def _selected(spec: ModelSpec, kind: FeedForwardKind, ffn: int, share: TokenShare, stack: Stack) -> int:
    """Returns the elements per token that selective recomputation keeps: outputs of projections and fused attention,
    and the two hidden states that norms and sums begin from (three, where results are normalised too). Sequence
    parallelism gathers what a region reads: that stays as well."""
    everything = partial(_layer, spec, kind, ffn, share, stack)
    others = stack.selected(spec, ffn, share.seq_len, share.token_parts, everything)
    if others is not None:
        return others
    states = (3 if spec.post_norms else 2) * spec.hidden // share.token_parts
    gathered = 2 * spec.hidden if share.token_parts > 1 else 0
    fused = not stack.compiled and _is_one(spec, stack)  # whose result nobody makes again
    rest = kind.selected(spec, ffn, stack.compiled, fused, share.routed_parts)
    return states + gathered + spec.attention.selected(spec, stack.compiled) + rest


@dataclass(frozen=True)
class Kept:
    """The activations that a stage keeps for backward, in elements per token."""

    between: int  # what a stage's forward leaves for its backward
    repeated: int  # on top of it at most, what backward has of the blocks that it computes again together
    at: int  # the layer where that is


def kept_activations(
    spec: ModelSpec, layers: Sequence[LayerSpec], mode: str, share: TokenShare, stack: Stack = OURS
) -> Kept:
    """Returns the elements per token that one stage's layers keep, by mode of recomputation. Backward goes from the
    last layer to the first: when it computes a block again, the ones after it are gone."""
    known: dict[object, int] = {}

    def full(part: Sequence[LayerSpec]) -> int:
        """Returns the elements per token that these layers keep; parts that are alike are counted once."""
        kinds = tuple(layer.kind for layer in part)
        if kinds not in known:
            known[kinds] = layer_activations(spec, part, share, stack)
        return known[kinds]

    numbers = range(layers[0].index, layers[0].index + len(layers))
    if recompute_of(mode).is_selective:
        between = layer_activations(spec, layers, share, stack, selective=True)
        return Kept(between, (full(layers) - between) // len(layers), numbers[-1])
    state = spec.hidden // share.token_parts
    gone = most = 0
    at = stop = numbers.stop
    for part in reversed(segments(mode, numbers)):
        gone += full(layers[part.stop - numbers.start : stop - numbers.start])
        again = full(layers[part.start - numbers.start : part.stop - numbers.start]) - state
        if again - gone > most:
            most, at = again - gone, part.stop
        gone, stop = gone + state, part.start
    return Kept(gone + full(layers[: stop - numbers.start]), most, at - 1)
