"""The setting over a model of transformers: GPT-NeoX, which our decoder does not describe."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from peers.setting import HEAD, Setting
from shardwise.model.decoder import Losses


class WithLoss(nn.Module):
    """What all variants call: transformers' model and the summed loss of its logits."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Losses:
        logits_BTV = self.inner(tokens_BT).logits
        total = F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        return Losses(total, total.new_zeros(()), total.new_zeros(()))


@dataclass(frozen=True)
class NeoxSetting(Setting):
    blocks = "inner.gpt_neox.layers"
    block_class = "GPTNeoXLayer"
    vocab = 1024  # type: ignore[assignment]

    def new_model(self) -> nn.Module:
        from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

        torch.manual_seed(self.seed)
        config = GPTNeoXConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.hidden // HEAD,
            intermediate_size=4 * self.hidden,
            max_position_embeddings=max(self.seq_len, 128),
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        return WithLoss(GPTNeoXForCausalLM(config))
