"""Rotary positions: the angles, their long-context scalings, and how they rotate queries and keys.

Owns no state: cosines and sines are computed from the spec once per forward pass, so a model that was built on `meta`,
moved or cast needs nothing restored. Invariant: angles are computed in fp32 (fp64 for an fp64 model), whatever the
model's dtype. Read next: `attention.py`, which applies them.

Shapes: B batch, T tokens, H heads, R rotary dimensions of a head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from shardwise.spec.model import LayerSpec, ModelSpec


class Rotation(NamedTuple):
    """The cosines and sines by which a layer rotates its queries and keys; they broadcast over heads."""

    cos_BT1R: Tensor  # R here is half the rotary dimensions: one angle per pair
    sin_BT1R: Tensor
    interleaved: bool


def make_rotation(spec: ModelSpec, layer: LayerSpec, positions_BT: Tensor, dtype: torch.dtype) -> Rotation:
    """Returns the rotation of every token of a batch, in the model's dtype."""
    work = torch.float64 if dtype == torch.float64 else torch.float32
    frequencies_R = inverse_frequencies(spec, layer, positions_BT.device).to(work)
    angles_BT1R = (positions_BT.to(work)[..., None] * frequencies_R)[:, :, None, :]
    factor = attention_factor(spec) if layer.rope_scaled else 1.0
    return Rotation(
        (angles_BT1R.cos() * factor).to(dtype), (angles_BT1R.sin() * factor).to(dtype), spec.rope_interleaved
    )


def rotate(x_BTHR: Tensor, rotation: Rotation) -> Tensor:
    """Rotates each pair of dimensions by its angle; the shape stays (B, T, H, R).

    A pair is (i, i + R/2) in most models and (2i, 2i + 1) when interleaved. The result always has the first layout:
    queries and keys are permuted alike, so their dot products do not change, and no second shuffle is needed.
    """
    if rotation.interleaved:
        first, second = x_BTHR[..., 0::2], x_BTHR[..., 1::2]
    else:
        first, second = x_BTHR.chunk(2, dim=-1)
    cos, sin = rotation.cos_BT1R.to(x_BTHR.dtype), rotation.sin_BT1R.to(x_BTHR.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def inverse_frequencies(spec: ModelSpec, layer: LayerSpec, device: torch.device) -> Tensor:
    """Returns the radians per position of each pair, of shape (R/2,): theta^(-2i/R), changed by the model's scaling
    rule where the layer uses it."""
    dim = spec.rotary_dim
    exponents_R = torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim
    plain_R = 1.0 / layer.rope_theta**exponents_R
    if not layer.rope_scaled:
        return plain_R
    if spec.rope_scaling == "linear":
        return plain_R / spec.rope_factor
    if spec.rope_scaling == "llama3":
        return _llama3(spec, plain_R)
    return _yarn(spec, plain_R, layer.rope_theta, dim)


def _llama3(spec: ModelSpec, plain_R: Tensor) -> Tensor:
    """Returns Llama 3.1's frequencies: slow pairs (few turns within the original length) are slowed by the factor, fast
    ones are kept, and those between are blended."""
    turns_R = spec.rope_original_max_seq_len * plain_R / (2 * math.pi)
    low, high = spec.rope_low_freq_factor, spec.rope_high_freq_factor
    keep_R = ((turns_R - low) / (high - low)).clamp(0, 1)
    return keep_R * plain_R + (1 - keep_R) * plain_R / spec.rope_factor


def _yarn(spec: ModelSpec, plain_R: Tensor, theta: float, dim: int) -> Tensor:
    """Returns YaRN's frequencies (arXiv 2309.00071, section 3.2): a ramp over dimensions from kept (beta_fast turns) to
    slowed (beta_slow)."""

    def dimension_of(turns: float) -> float:
        return dim * math.log(spec.rope_original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(dimension_of(spec.rope_beta_fast)), 0)
    high = min(math.ceil(dimension_of(spec.rope_beta_slow)), dim - 1)
    index_R = torch.arange(dim // 2, dtype=torch.float32, device=plain_R.device)
    slow_R = ((index_R - low) / max(high - low, 0.001)).clamp(0, 1)
    return slow_R * plain_R / spec.rope_factor + (1 - slow_R) * plain_R


def attention_factor(spec: ModelSpec) -> float:
    """Returns YaRN's temperature, a factor on cosines and sines; 1 for the other scalings."""
    if spec.rope_scaling != "yarn":
        return 1.0
    if spec.rope_attention_factor:
        return spec.rope_attention_factor
    if spec.rope_mscale and spec.rope_mscale_all_dim:
        return _mscale(spec.rope_factor, spec.rope_mscale) / _mscale(spec.rope_factor, spec.rope_mscale_all_dim)
    return _mscale(spec.rope_factor, 1.0)


def softmax_scale(spec: ModelSpec) -> float:
    """Returns the factor on attention scores: 1/sqrt(head_dim) unless the spec says otherwise."""
    scale = (spec.query_scale_dim or spec.head_dim) ** -0.5
    if spec.attention.yarn_scales_scores and spec.rope_scaling == "yarn" and spec.rope_mscale_all_dim:
        # DeepSeek moves YaRN's temperature from the rotated dimensions to the whole score.
        scale *= _mscale(spec.rope_factor, spec.rope_mscale_all_dim) ** 2
    return scale


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
