"""The two norms of the decoder, chosen by the spec: RMSNorm (optionally scaled by 1 + weight) and LayerNorm.

Owns nothing but their arithmetic. Both compute in at least fp32 inside torch's own kernels. Read next: `decoder.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.spec.model import ModelSpec


class RMSNorm(nn.Module):
    """x / rms(x), scaled by `weight`, or by 1 + `weight` as Gemma does so that weight decay pulls the scale to one."""

    def __init__(self, dim: int, eps: float, plus_one: bool = False):
        super().__init__()
        self.dim, self.eps, self.plus_one = dim, eps, plus_one
        self.weight = nn.Parameter(torch.zeros(dim) if plus_one else torch.ones(dim))

    def factor(self) -> Tensor:
        """Returns what the normalised elements are multiplied by, of shape (dim,)."""
        return 1 + self.weight if self.plus_one else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.dim,), self.factor(), self.eps)


def make_norm(spec: ModelSpec, dim: int) -> nn.Module:
    """Returns the model's kind of norm, over the last dimension of size `dim`."""
    if spec.norm == "layer":
        return nn.LayerNorm(dim, eps=spec.norm_eps)
    return RMSNorm(dim, spec.norm_eps, spec.norm_plus_one)
