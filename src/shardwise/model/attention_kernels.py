"""The kernels of torch that compute softmax(QK^T)V, and which of them a model takes.

Invariant: every kernel computes the same function; "math" is the definition that the others are tested against. A
kernel that is not torch's own is one more `AttentionKernel`, handed to the decoder (kernels/flash4.py). Read next:
`masking.py`.

Shapes: B batch, T query tokens, S key tokens, H heads, K key-value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.errors import UserError
from shardwise.model.masking import Mask
from shardwise.spec.model import ModelSpec

HALVES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class AttentionKernel:
    """One way to compute softmax(scale * QK^T, softly capped, masked) V."""

    name: str
    compute: Callable[[Tensor, Tensor, Tensor, Mask, float, float], Tensor]
    """From queries (B, T, H, C), keys and values (B, S, K, C), mask, scale and soft cap (0: none) to (B, T, H, C)."""
    needs_cuda: bool = False
    has_softcap: bool = False


def attend(
    q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, mask: Mask, kernel: AttentionKernel, scale: float, softcap: float
) -> Tensor:
    """Returns attention of shape (B, T, H, C), computed by the given kernel over whole sequences. Whoever splits
    sequences into parts replaces this function (`AttentionInputs.attend`)."""
    return kernel.compute(q_BTHC, k_BSKC, v_BSKC, mask, scale, softcap)


def _sdpa(
    q_BTHC: Tensor,
    k_BSKC: Tensor,
    v_BSKC: Tensor,
    mask: Mask,
    scale: float,
    _softcap: float,
    backend: SDPBackend | None = None,
) -> Tensor:
    """Computes attention by torch's scaled_dot_product_attention. Without a `backend` torch chooses the kernel."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTHC, k_BSKC, v_BSKC))
    # CUDA's flash and cuDNN kernels take grouped heads as they are, in 16 bits and without a mask. Everything else
    # there (fp32, masks) is for the memory-efficient kernel, which knows no grouped heads: asked for them, torch falls
    # back to building the whole score matrix. On a CPU grouped heads cost what repeated ones cost and spare two copies
    # (12.7 ms both ways at tiny's shape, 4 x 256 tokens on one core).
    grouped = mask.allowed_1TS is None and (not q.is_cuda or q.dtype in HALVES)
    if not grouped:
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    if backend is not None and mask.is_causal and grouped:
        with sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.allowed_1TS, is_causal=mask.is_causal, scale=scale, enable_gqa=grouped
        )
    return out.transpose(1, 2)


def _cudnn(q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, mask: Mask, scale: float, softcap: float) -> Tensor:
    return _sdpa(q_BTHC, k_BSKC, v_BSKC, mask, scale, softcap, SDPBackend.CUDNN_ATTENTION)


def _flash(q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, mask: Mask, scale: float, softcap: float) -> Tensor:
    return _sdpa(q_BTHC, k_BSKC, v_BSKC, mask, scale, softcap, SDPBackend.FLASH_ATTENTION)


def _math(q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, mask: Mask, scale: float, softcap: float) -> Tensor:
    """Computes attention by its definition, in plain operations; the softmax is at least fp32."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTHC, k_BSKC, v_BSKC))
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
    return (scores.softmax(-1, dtype=work).to(v.dtype) @ v).transpose(1, 2)


def _flex(q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, mask: Mask, scale: float, softcap: float) -> Tensor:
    if mask.block_mask is None:  # with a cache; see Decoder.prepare_masks
        return (_math if softcap else _sdpa)(q_BTHC, k_BSKC, v_BSKC, mask, scale, softcap)
    q, k, v = (tensor.transpose(1, 2) for tensor in (q_BTHC, k_BSKC, v_BSKC))
    score_mod = partial(_softcap_rule, softcap) if softcap else None
    how = {"score_mod": score_mod, "block_mask": mask.block_mask, "scale": scale, "enable_gqa": True}
    return _compiled_flex()(q, k, v, **how).transpose(1, 2)


def _softcap_rule(softcap: float, score: Tensor, *_indices: Tensor) -> Tensor:
    return torch.tanh(score / softcap) * softcap


@cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)  # uncompiled it would build the whole score matrix


def _repeat_heads(x_BKSC: Tensor, num_heads: int) -> Tensor:
    groups = num_heads // x_BKSC.shape[1]
    return x_BKSC if groups == 1 else x_BKSC.repeat_interleave(groups, dim=1)


KERNELS = {
    kernel.name: kernel
    for kernel in (
        AttentionKernel("sdpa", _sdpa),
        AttentionKernel("math", _math, has_softcap=True),
        AttentionKernel("flex", _flex, needs_cuda=True, has_softcap=True),
        AttentionKernel("cudnn", _cudnn, needs_cuda=True),
        AttentionKernel("flash", _flash, needs_cuda=True),
    )
}
"""torch's own kernels by name. `cudnn` and `flash` are fused kernels for 16 bits; `sdpa` leaves the choice to torch."""


def choose_kernel(spec: ModelSpec, attention: str | AttentionKernel) -> tuple[AttentionKernel, str]:
    """Returns the kernel to use and, where it is not the obvious one, the reason to print (else an empty string).
    `attention` is a name of `KERNELS`, `auto` or a kernel."""
    if isinstance(attention, str) and attention != "auto" and attention not in KERNELS:
        raise UserError(
            f"unknown attention `{attention}`",
            why=f"kernels are: {', '.join(('auto', *KERNELS))}",
            fix='use model.attention = "auto"',
        )
    asked = attention if isinstance(attention, AttentionKernel) else KERNELS.get(attention)
    if asked is not None and (asked.has_softcap or not spec.attention_softcap):
        return asked, ""
    if not spec.attention_softcap:
        return KERNELS["sdpa"], ""
    reason = f"{spec.name} caps its attention scores softly, which SDPA cannot do"
    if asked is not None:
        raise UserError(
            f"attention {asked.name} does not fit this model", why=reason, fix='use model.attention = "auto"'
        )
    return KERNELS["math"], f"attention: math instead of sdpa, because {reason}"


def check_kernel_device(kernel: AttentionKernel, device_type: str) -> None:
    if kernel.needs_cuda and device_type != "cuda":
        why = "FlexAttention has no backward pass there" if kernel.name == "flex" else "it is a kernel of CUDA"
        raise UserError(
            f"attention {kernel.name} does not run on {device_type}",
            why=why,
            fix='use model.attention = "auto"',
        )
