"""Makes FlashAttention 4 two operations of torch, which compiled blocks take as they are.

The package (flash-attn-4) is optional, and its kernels are for Hopper and newer. On an H200 they need 0.85 to 0.93 of
the time of cuDNN's (docs/log.md). torch 2.11 can put them in the place of its own flash kernel, but only an older
release of them, so they have operations of their own here. Invariant: causal attention in 16 bits with grouped heads,
the function of model/attention_kernels.py; results lie in memory as queries, keys and values would, densely.

Shapes: B batch, T tokens, H heads, K key-value heads, C channels of a head.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from typing import Any

import torch
from torch import Tensor

from shardwise.model.attention_kernels import HALVES, KERNELS, AttentionKernel
from shardwise.model.masking import Mask

LEAST_CAPABILITY = (9, 0)
INTERFACE = "flash_attn.cute.interface"


@cache
def can_run(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    try:
        return bool(_interface())
    except ImportError:
        return False


@cache
def _interface() -> Any:
    warnings.filterwarnings("ignore", category=UserWarning, module=r"cutlass\.")  # its compiler, about itself
    return importlib.import_module(INTERFACE)


def _compute(q_BTHC: Tensor, k_BSKC: Tensor, v_BSKC: Tensor, mask: Mask, scale: float, softcap: float) -> Tensor:
    if mask.is_causal and q_BTHC.dtype in HALVES:
        return torch.ops.shardwise.flash.default(q_BTHC, k_BSKC, v_BSKC, scale)[0]
    return KERNELS["sdpa"].compute(q_BTHC, k_BSKC, v_BSKC, mask, scale, softcap)


FLASH4 = AttentionKernel("flash4", _compute, needs_cuda=True)
"""FlashAttention 4 as a layer holds it. Where it cannot compute (a mask, 32 bits) torch's own kernels do."""


def kernel_named(attention: str) -> str | AttentionKernel:
    """Returns the kernel of this name, torch's own or this one; other names (`auto`) are returned for the decoder to
    judge."""
    return {**KERNELS, FLASH4.name: FLASH4}.get(attention, attention)


def _forward(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out_BTHC, lse_BHT, *_ = _interface()._flash_attn_fwd(
        q_BTHC, k_BTKC, v_BTKC, softmax_scale=scale, causal=True, return_lse=True
    )
    return out_BTHC, lse_BHT


def _forward_shapes(q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    batch, tokens, heads, _ = q_BTHC.shape
    lse_BHT = q_BTHC.new_empty(batch, heads, tokens, dtype=torch.float32)
    return q_BTHC.new_empty(batch, tokens, heads, v_BTKC.shape[-1]), lse_BHT


def _backward(
    grad_BTHC: Tensor, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, out_BTHC: Tensor, lse_BHT: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    dq_BTHC, dk_BTKC, dv_BTKC = _backward_shapes(grad_BTHC, q_BTHC, k_BTKC, v_BTKC, out_BTHC, lse_BHT, scale)
    _interface()._flash_attn_bwd(
        *(q_BTHC, k_BTKC, v_BTKC, out_BTHC, grad_BTHC, lse_BHT),
        **{"dq": dq_BTHC, "dk": dk_BTKC, "dv": dv_BTKC, "softmax_scale": scale, "causal": True},
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return dq_BTHC, dk_BTKC, dv_BTKC


def _backward_shapes(
    grad_BTHC: Tensor, q_BTHC: Tensor, k_BTKC: Tensor, v_BTKC: Tensor, out_BTHC: Tensor, lse_BHT: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BTHC.new_empty(q_BTHC.shape), k_BTKC.new_empty(k_BTKC.shape), v_BTKC.new_empty(v_BTKC.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:  # torch names its arguments
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, grad_BTHC: Tensor, _grad_lse: Any) -> tuple[Tensor | None, ...]:
    return *torch.ops.shardwise.flash_backward.default(grad_BTHC, *ctx.saved_tensors, ctx.scale), None


_here = torch.library.Library("shardwise", "FRAGMENT")
_here.define("flash(Tensor q, Tensor k, Tensor v, float scale) -> (Tensor, Tensor)")
_here.define(
    "flash_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)
_here.impl("flash", _forward, "CUDA")
_here.impl("flash_backward", _backward, "CUDA")
torch.library.register_fake("shardwise::flash", _forward_shapes, lib=_here)
torch.library.register_fake("shardwise::flash_backward", _backward_shapes, lib=_here)
torch.library.register_autograd("shardwise::flash", _gradients, setup_context=_keep, lib=_here)
