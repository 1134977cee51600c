"""Initial weights: each parameter is drawn from (seed, its name), so a model starts from the same ones however it is
built.

Owns the distribution by name and the draw. Invariant: a value depends on seed, name and shape only; never on the order
of drawing, the device, the dtype or which other parameters exist. Read next: `decoder.py` for the names.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from shardwise.model.decoder import Decoder
from shardwise.model.experts import moe_layers
from shardwise.spec.model import ModelSpec

STD = 0.02


@torch.no_grad()
def initialize(model: Decoder, seed: int) -> None:
    """Initializes a model that has memory (a `meta` model first needs `to_empty`), buffers included."""
    for name, parameter in model.named_parameters():
        assert not parameter.is_meta, f"{name} is on meta: call model.to_empty(device=...) before initialize"
        parameter.copy_(initial_value(model.spec, name, tuple(parameter.shape), seed))
    for layer in moe_layers(model):
        layer.tokens_per_expert.zero_()
        if layer.router.bias is not None:
            layer.router.bias.zero_()


def initial_value(spec: ModelSpec, name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns the initial value of one parameter at full shape, in fp32 on the CPU. GPT-2's rule: N(0, 0.02), smaller
    where a result is added to the residual."""
    if len(shape) == 1:
        is_scale = name.endswith("norm.weight") and not spec.norm_plus_one
        return torch.ones(shape, device="cpu") if is_scale else torch.zeros(shape, device="cpu")
    joins_residual = name.removesuffix(".weight").rsplit(".", 1)[-1] in ("o", "down")
    std = STD / (2 * spec.num_layers) ** 0.5 if joins_residual else STD
    if len(shape) == 3:  # stacked experts: each from its own name, so that any of them can be drawn alone
        return torch.stack([_normal(f"{name}.{expert}", shape[1:], std, seed) for expert in range(shape[0])])
    return _normal(name, shape, std, seed)


def _normal(name: str, shape: tuple[int, ...], std: float, seed: int) -> Tensor:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32, device="cpu").normal_(0.0, std, generator=generator)
