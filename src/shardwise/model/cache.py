"""What generation remembers: per layer the keys and values (or latents) of every token so far.

Invariant: `length` tokens are stored in every layer; the decoder advances it after its last layer, so all layers of one
forward pass write at the same place. Read next: `attention.py` and `latent_attention.py`, which append to it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from shardwise.errors import UserError


class KeyValueCache:
    """Holds tensors per layer, tokens along dim 1: keys and values, or latents and rotated keys.

    Room for `max_len` tokens is made when a layer first stores something, in the shape and format it comes in: a slice
    of the heads or a part of the layers needs no more than that.
    """

    def __init__(self, max_len: int):
        self.length, self.max_len = 0, max_len
        self.theirs: Any = None  # of a model of transformers: its own cache; the tokens themselves are stored here
        self._stores: dict[int, list[Tensor]] = {}

    def append(self, layer_index: int, *new: Tensor) -> list[Tensor]:
        """Stores the new tokens' tensors and returns each together with everything before it, tokens along dim 1."""
        end = self.length + new[0].shape[1]
        if end > self.max_len:
            raise UserError(
                f"the cache holds {self.max_len} tokens, {end} were asked for",
                why="prompt and new tokens together are longer than the cache made for them",
                fix="ask for fewer new tokens, or a longer cache",
            )
        if layer_index not in self._stores:
            self._stores[layer_index] = [t.new_zeros(t.shape[0], self.max_len, *t.shape[2:]) for t in new]
        stores = self._stores[layer_index]
        for store, tensor in zip(stores, new, strict=True):
            store[:, self.length : end] = tensor
        return [store[:, :end] for store in stores]

    def advance(self, num_tokens: int) -> None:
        self.length += num_tokens
