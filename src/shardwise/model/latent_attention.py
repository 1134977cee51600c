"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values live in one small latent.

Owns the down- and up-projections around it; the kernels are those of `attention_kernels.py`. Invariant: what the cache
stores per token is the normalised latent and the rotated shared key, nothing per head. The paper's symbols are in
comments.

Shapes: B batch, T query tokens, S key tokens, D model width, H heads, N unrotated and R rotated channels of a head,
L latent width, V value channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.attention import AttentionInputs
from shardwise.model.attention_kernels import AttentionKernel
from shardwise.model.norm import RMSNorm
from shardwise.model.rope import rotate, softmax_scale
from shardwise.spec.model import LayerSpec, ModelSpec

LATENT_NORM_EPS = 1e-6  # fixed in DeepSeek's code, whatever the model's own norm_eps


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are projected up from one latent of L channels per token."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, kernel: AttentionKernel):
        super().__init__()
        self.index, self.kernel = layer.index, kernel
        self.softcap, self.scale = spec.attention_softcap, softmax_scale(spec)
        self.latent_dim, self.value_dim = spec.kv_lora_rank, spec.v_head_dim
        self.nope_dim, self.rope_dim = spec.qk_nope_head_dim, spec.qk_rope_head_dim
        query_width = spec.num_heads * (self.nope_dim + self.rope_dim)
        self.q_down: nn.Module = nn.Identity()
        self.q_norm: nn.Module = nn.Identity()
        if spec.q_lora_rank:
            self.q_down = nn.Linear(spec.hidden, spec.q_lora_rank, bias=False)  # W^DQ
            self.q_norm = RMSNorm(spec.q_lora_rank, LATENT_NORM_EPS)
        self.q = nn.Linear(spec.q_lora_rank or spec.hidden, query_width, bias=False)  # W^UQ and W^QR
        self.kv_down = nn.Linear(spec.hidden, self.latent_dim + self.rope_dim, bias=False)  # W^DKV and W^KR
        self.kv_norm = RMSNorm(self.latent_dim, LATENT_NORM_EPS)
        self.kv_up = nn.Linear(
            self.latent_dim, spec.num_heads * (self.nope_dim + self.value_dim), bias=False
        )  # W^UK, W^UV
        self.o = nn.Linear(spec.num_heads * self.value_dim, spec.hidden, bias=False)

    def forward(self, x_BTD: Tensor, inputs: AttentionInputs) -> Tensor:
        assert inputs.rotation is not None, "latent attention needs rotary positions"
        # 1. Queries: an unrotated part q^C and a rotated part q^R per head.
        q_BTHQ = self.q(self.q_norm(self.q_down(x_BTD))).unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        q_nope_BTHN, q_rope_BTHR = q_BTHQ.split([self.nope_dim, self.rope_dim], dim=-1)
        q_BTHQ = torch.cat((q_nope_BTHN, rotate(q_rope_BTHR, inputs.rotation)), dim=-1)
        # 2. The latent c^KV and one rotated key k^R shared by all heads: all that is cached.
        latent_BTL, k_rope_BTR = self.kv_down(x_BTD).split([self.latent_dim, self.rope_dim], dim=-1)
        latent_BSL = self.kv_norm(latent_BTL)
        k_rope_BSR = rotate(k_rope_BTR.unsqueeze(2), inputs.rotation).squeeze(2)
        if inputs.cache is not None:
            latent_BSL, k_rope_BSR = inputs.cache.append(self.index, latent_BSL, k_rope_BSR)
        # 3. Keys k^C and values v^C of every head from the latent.
        kv_BSHX = self.kv_up(latent_BSL).unflatten(-1, (-1, self.nope_dim + self.value_dim))
        k_nope_BSHN, v_BSHV = kv_BSHX.split([self.nope_dim, self.value_dim], dim=-1)
        k_rope_BSHR = k_rope_BSR.unsqueeze(2).expand(-1, -1, k_nope_BSHN.shape[2], -1)
        k_BSHQ = torch.cat((k_nope_BSHN, k_rope_BSHR), dim=-1)
        # 4. Attention. Fused kernels want values as wide as queries: pad with zeros, cut the result.
        padding = 0 if self.kernel.name == "math" else max(0, q_BTHQ.shape[-1] - self.value_dim)
        out_BTHV = inputs.attend(
            q_BTHQ, k_BSHQ, F.pad(v_BSHV, (0, padding)), inputs.mask, self.kernel, self.scale, self.softcap
        )
        return self.o(out_BTHV[..., : self.value_dim].flatten(-2))
