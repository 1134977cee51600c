"""Attention: projections, rotary positions, and the ways to compute softmax(QK^T)V.

Owns grouped-query attention and the kernels that latent attention shares. Invariant: every kernel computes the same
function ("math" is the reference they are tested against). Read next: `masking.py`, `rope.py`, `latent_attention.py`.

Shapes: B batch, T query tokens, S key tokens, D model width, H heads, K key-value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.errors import UserError
from shardwise.kernels import flash4
from shardwise.model.cache import KeyValueCache
from shardwise.model.feedforward import join, join_adapters
from shardwise.model.masking import Mask
from shardwise.model.norm import make_norm
from shardwise.model.rope import Rotation, rotate, softmax_scale
from shardwise.spec.model import LayerSpec, ModelSpec

KERNELS = ("auto", "sdpa", "math", "flex", "cudnn", "flash", "flash4")
FUSED = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
"""Kernels of torch's scaled_dot_product_attention for 16 bits on CUDA. `sdpa` leaves the choice to torch."""
ON_CUDA = ("flex", *FUSED, "flash4")
HALVES = (torch.bfloat16, torch.float16)


def attend(
    q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, mask: Mask, kernel: str, scale: float, softcap: float
) -> Tensor:
    """softmax(scale * QK^T, softly capped, masked) V by the chosen kernel."""
    if kernel == "flash4" and mask.is_causal and q_BTHC.dtype in HALVES:
        return flash4.attend_causally(q_BTHC, k_BSKC, v_BSKC, scale)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTHC, k_BSKC, v_BSKC))
    if kernel == "flex" and mask.block_mask is None:
        kernel = "math" if softcap else "sdpa"  # with a cache; see Decoder.prepare_attention
    if kernel == "math":
        out = _math(q, k, v, mask, scale, softcap)
    elif kernel == "flex":
        out = _flex(q, k, v, mask, scale, softcap)
    else:
        out = _sdpa(q, k, v, mask, scale, kernel)
    return out.transpose(1, 2)


Attend = Callable[[Tensor, Tensor, Tensor, Mask, str, float, float], Tensor]


@dataclass(frozen=True)
class AttentionInputs:
    """What every layer of one kind shares in a forward pass. `attend`: another way to compute what the function above does."""

    mask: Mask
    rotation: Rotation | None
    cache: KeyValueCache | None = None
    attend: Attend = attend
    rows_B: Tensor | None = None  # number of each row among all rows of all steps: what chance is drawn from
    positions_BT: Tensor | None = None


class Attention(nn.Module):
    """Causal self-attention with H query heads that share K key-value heads."""

    joined = False  # queries, keys and values are one product
    joined_adapters = False  # only what is narrow of them is

    def __init__(self, spec: ModelSpec, layer: LayerSpec, kernel: str):
        super().__init__()
        self.index, self.head_dim = layer.index, spec.head_dim
        self.kernel, self.softcap, self.scale = kernel, spec.attention_softcap, softmax_scale(spec)
        query_width, key_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q = nn.Linear(spec.hidden, query_width, bias=spec.qkv_bias)
        self.k = nn.Linear(spec.hidden, key_width, bias=spec.qkv_bias)
        self.v = nn.Linear(spec.hidden, key_width, bias=spec.qkv_bias)
        self.o = nn.Linear(query_width, spec.hidden, bias=spec.out_bias)
        self.q_norm = make_norm(spec, spec.head_dim) if spec.qk_norm else nn.Identity()
        self.k_norm = make_norm(spec, spec.head_dim) if spec.qk_norm else nn.Identity()

    def forward(self, x_BTD: Tensor, inputs: AttentionInputs) -> Tensor:
        # Heads are counted from the tensors (-1), so that a slice of the heads works the same way.
        if self.joined:
            sizes = [part.weight.shape[0] for part in (self.q, self.k, self.v)]
            q_BTX, k_BTX, v_BTX = join([self.q, self.k, self.v], x_BTD).split(sizes, dim=-1)
        elif self.joined_adapters:
            q_BTX, k_BTX, v_BTX = join_adapters([self.q, self.k, self.v], x_BTD)
        else:
            q_BTX, k_BTX, v_BTX = self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
        q_BTHC = self.q_norm(q_BTX.unflatten(-1, (-1, self.head_dim)))
        k_BTKC = self.k_norm(k_BTX.unflatten(-1, (-1, self.head_dim)))
        v_BTKC = v_BTX.unflatten(-1, (-1, self.head_dim))
        if inputs.rotation is not None:
            q_BTHC, k_BTKC = rotate(q_BTHC, inputs.rotation), rotate(k_BTKC, inputs.rotation)
        k_BSKC, v_BSKC = k_BTKC, v_BTKC
        if inputs.cache is not None:
            k_BSKC, v_BSKC = inputs.cache.append(self.index, k_BTKC, v_BTKC)
        out_BTHC = inputs.attend(q_BTHC, k_BSKC, v_BSKC, inputs.mask, self.kernel, self.scale, self.softcap)
        return self.o(out_BTHC.flatten(-2))


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, kernel: str = "sdpa") -> Tensor:
    # CUDA's flash and cuDNN kernels take grouped heads as they are, in 16 bits and without a mask. Everything else there
    # (fp32, masks) is for the memory-efficient kernel, which knows no grouped heads: asked for them, torch falls back to
    # building the whole score matrix. On a CPU grouped heads cost what repeated ones cost and spare two copies (12.7 ms
    # both ways at tiny's shape, 4 x 256 tokens on one core).
    grouped = mask.allowed_1TS is None and (not q.is_cuda or q.dtype in HALVES)
    if not grouped:
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    if kernel in FUSED and mask.is_causal and grouped:
        with sdpa_kernel(FUSED[kernel]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask.allowed_1TS, is_causal=mask.is_causal, scale=scale, enable_gqa=grouped
    )


def _math(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float) -> Tensor:
    """The definition, in plain operations; the softmax is at least fp32."""
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    scores = (q @ k.transpose(-1, -2)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if mask.is_causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
    elif mask.allowed_1TS is not None:
        scores = scores.masked_fill(~mask.allowed_1TS, float("-inf"))
    work = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(-1, dtype=work).to(v.dtype) @ v


def _flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, softcap: float) -> Tensor:
    score_mod = partial(_softcap_rule, softcap) if softcap else None
    return _compiled_flex()(q, k, v, score_mod=score_mod, block_mask=mask.block_mask, scale=scale, enable_gqa=True)


def _softcap_rule(softcap: float, score: Tensor, *_indices: Tensor) -> Tensor:
    return torch.tanh(score / softcap) * softcap


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # uncompiled it would build the whole score matrix


def _repeat_heads(x_BKSC: Tensor, num_heads: int) -> Tensor:
    groups = num_heads // x_BKSC.shape[1]
    return x_BKSC if groups == 1 else x_BKSC.repeat_interleave(groups, dim=1)


def choose_kernel(spec: ModelSpec, attention: str) -> tuple[str, str]:
    """The kernel to use and, where it is not the obvious one, the reason to print."""
    if attention not in KERNELS:
        raise UserError(
            f"unknown attention `{attention}`",
            why=f"kernels are: {', '.join(KERNELS)}",
            fix='use model.attention = "auto"',
        )
    if spec.attention_softcap and attention in ("auto", "sdpa", "flash4", *FUSED):
        reason = f"{spec.name} caps its attention scores softly, which SDPA cannot do"
        if attention != "auto":
            raise UserError(
                f"attention {attention} does not fit this model", why=reason, fix='use model.attention = "auto"'
            )
        return "math", f"attention: math instead of sdpa, because {reason}"
    return ("sdpa" if attention == "auto" else attention), ""


def check_kernel_device(kernel: str, device_type: str) -> None:
    if kernel in ON_CUDA and device_type != "cuda":
        why = "FlexAttention has no backward pass there" if kernel == "flex" else "it is a kernel of CUDA"
        raise UserError(
            f"attention {kernel} does not run on {device_type}",
            why=why,
            fix='use model.attention = "auto"',
        )
