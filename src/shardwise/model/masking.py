"""Which tokens may look at which: causality, sliding windows and document masks, decided once per forward pass.

Owns the boolean masks and the choice of the fast causal path. Invariant: layers with the same window share one mask,
and a mask exists only where plain causality is not enough. Read next: `attention.py`, which consumes them.

Shapes: B batch, T query tokens, S key tokens (T, plus what a cache holds).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.spec.model import LayerSpec


@dataclass(frozen=True)
class Mask:
    """Which keys the queries of some layers may see. `is_causal` without `allowed_1TS` is the kernels' fast path."""

    is_causal: bool
    allowed_1TS: Tensor | None = None  # (1 or B, 1, T, S), True where a query may look; the 1 broadcasts over heads
    block_mask: object | None = None  # FlexAttention's own form, built only for it


@dataclass(frozen=True)
class MaskBuilder:
    """The geometry of this forward pass: `num_past` keys are in the cache before the T new tokens."""

    num_tokens: int
    num_past: int
    device: torch.device
    documents_BT: Tensor | None = None

    def build(self, layers: tuple[LayerSpec, ...], flex: bool) -> dict[int | None, Mask]:
        """Returns one mask per distinct window, by `key(layer)`."""
        windows = {self.key(layer) for layer in layers}
        return {window: self._flex(window) if flex else self._dense(window) for window in windows}

    def key(self, layer: LayerSpec) -> int | None:
        """Returns the layer's window in tokens, or None where it covers the whole sequence and so changes nothing."""
        num_keys = self.num_past + self.num_tokens
        return layer.window if layer.window is not None and layer.window < num_keys else None

    def _dense(self, window: int | None) -> Mask:
        if window is None and self.documents_BT is None:
            if self.num_past == 0:
                return Mask(is_causal=True)
            if self.num_tokens == 1:
                return Mask(is_causal=False)  # one new token sees everything there is
        queries_T = torch.arange(self.num_past, self.num_past + self.num_tokens, device=self.device)
        keys_S = torch.arange(self.num_past + self.num_tokens, device=self.device)
        distance_TS = queries_T[:, None] - keys_S[None, :]
        allowed_TS = distance_TS >= 0
        if window is not None:
            allowed_TS &= distance_TS < window
        if self.documents_BT is None:
            return Mask(is_causal=False, allowed_1TS=allowed_TS[None, None])
        same_BTS = self.documents_BT[:, :, None] == self.documents_BT[:, None, :]
        return Mask(is_causal=False, allowed_1TS=(same_BTS & allowed_TS)[:, None])

    def _flex(self, window: int | None) -> Mask:
        from torch.nn.attention.flex_attention import create_block_mask

        documents_BT, num_past = self.documents_BT, self.num_past
        batch = None if documents_BT is None else documents_BT.shape[0]
        num_keys = num_past + self.num_tokens
        may_look = _flex_rule(num_past, window, documents_BT)
        block_mask = create_block_mask(may_look, batch, None, self.num_tokens, num_keys, device=str(self.device))
        return Mask(is_causal=False, block_mask=block_mask)


def _flex_rule(num_past: int, window: int | None, documents_BT: Tensor | None) -> Callable[..., Tensor]:
    def may_look(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = query + num_past - key
        allowed = distance >= 0
        if window is not None:
            allowed = allowed & (distance < window)
        if documents_BT is not None:
            allowed = allowed & (documents_BT[batch, query] == documents_BT[batch, key])
        return allowed

    return may_look
