"""Puts liger-kernel's RMSNorm and SwiGLU in place of torch's (`speed.kernels = liger`), for blocks that are not
compiled.

One kernel each, and backward keeps no more than their inputs. Where blocks are compiled the compiler fuses both with
what stands around them, which is more.

Invariant: weights and names are what they were, and results are rounded where torch's kernels round them: a norm once,
after the weight ("gemma" is liger's name for that), the activation before it is multiplied.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.feedforward import FeedForward
from shardwise.model.norm import RMSNorm
from shardwise.model.replacement import become


def apply_liger(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            become(module, LigerNorm)
        elif isinstance(module, FeedForward) and module.gate is not None and module.activation is F.silu:
            become(module, LigerFeedForward)


class LigerNorm(RMSNorm):
    """An RMSNorm that liger-kernel computes."""

    def forward(self, x: Tensor) -> Tensor:
        from liger_kernel.ops import LigerRMSNormFunction

        in_place = False  # the gradient that arrives may be somebody else's too
        return LigerRMSNormFunction.apply(x, self.weight, self.eps, float(self.plus_one), "gemma", in_place, None)


class LigerFeedForward(FeedForward):
    """A feed-forward layer whose activation liger-kernel computes."""

    def hidden(self, x_BTD: Tensor) -> Tensor:
        from liger_kernel.ops import LigerSiLUMulFunction

        assert self.gate is not None
        return LigerSiLUMulFunction.apply(self.gate(x_BTD), self.up(x_BTD), 1.0, 1.0)
