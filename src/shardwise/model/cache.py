"""What generation remembers: per layer the keys and values (or latents) of every token so far.

Invariant: `length` tokens are stored in every layer; the decoder advances it after its last layer, so all layers of one
forward pass write at the same place. Read next: `attention.py` and `latent_attention.py`, which append to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.model.spec import ModelSpec


class KeyValueCache:
    """Two preallocated tensors per layer, tokens along dim 1: keys and values, or latents and rotated keys."""

    def __init__(self, spec: ModelSpec, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str):
        if spec.is_latent:
            # The point of latent attention: one latent and one rotated key per token instead of all heads' keys and values.
            widths: list[tuple[int, ...]] = [(spec.kv_lora_rank,), (spec.qk_rope_head_dim,)]
        else:
            widths = [(spec.num_kv_heads, spec.head_dim)] * 2
        self.length, self.max_len = 0, max_len
        self._stores = [
            [torch.zeros(batch, max_len, *width, dtype=dtype, device=device) for width in widths] for _ in spec.layers
        ]

    def append(self, layer_index: int, *new: Tensor) -> list[Tensor]:
        """Store the new tokens' tensors; return each together with everything before it."""
        end = self.length + new[0].shape[1]
        if end > self.max_len:
            raise UserError(
                f"the cache holds {self.max_len} tokens, {end} were asked for",
                why="prompt and new tokens together are longer than the cache made for them",
                fix="ask for fewer new tokens, or a longer cache",
            )
        for store, tensor in zip(self._stores[layer_index], new, strict=True):
            store[:, self.length : end] = tensor
        return [store[:, :end] for store in self._stores[layer_index]]

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens
