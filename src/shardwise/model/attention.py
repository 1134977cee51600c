"""Grouped-query attention: projections, rotary positions, softmax(QK^T)V and the projection back.

Read next: `attention_kernels.py`, `masking.py`, `rope.py`, then `latent_attention.py`.

Shapes: B batch, T query tokens, S key tokens, D model width, H heads, K key-value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from shardwise.model.attention_kernels import AttentionKernel, attend
from shardwise.model.cache import KeyValueCache
from shardwise.model.masking import Mask
from shardwise.model.norm import make_norm
from shardwise.model.rope import Rotation, rotate, softmax_scale
from shardwise.spec.model import LayerSpec, ModelSpec

Attend = Callable[[Tensor, Tensor, Tensor, Mask, AttentionKernel, float, float], Tensor]


@dataclass(frozen=True)
class AttentionInputs:
    """The inputs that all layers of one kind share in a forward pass.

    `attend` computes attention; whoever splits sequences into parts puts another function in its place. `rows_B`
    identifies each row among the rows of all steps: layers that draw random values derive them from it, and the plain
    model has no such layer."""

    mask: Mask
    rotation: Rotation | None
    cache: KeyValueCache | None = None
    attend: Attend = attend
    rows_B: Tensor | None = None
    positions_BT: Tensor | None = None


class Attention(nn.Module):
    """Causal self-attention with H query heads that share K key-value heads."""

    def __init__(self, spec: ModelSpec, layer: LayerSpec, kernel: AttentionKernel):
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
        # Heads are counted from the tensors (-1), so that a layer with only some of the heads works the same way.
        q_BTX, k_BTX, v_BTX = self.project(x_BTD)
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

    def project(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries (B, T, H*C), keys and values (B, T, K*C): the channels of all heads side by side."""
        return self.q(x_BTD), self.k(x_BTD), self.v(x_BTD)
