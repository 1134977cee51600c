"""liger-kernel's RMSNorm and SwiGLU in place of torch's (`speed.kernels = liger`), for blocks that are not compiled: one kernel each, and
backward keeps no more than their inputs. Where blocks are compiled the compiler fuses both with what stands around them, which is more.

Invariant: weights and names are what they were, and numbers are rounded where torch's kernels round them: a norm once, after the weight ("gemma"
is liger's name for that), the activation before it is multiplied.
"""

from __future__ import annotations

from types import MethodType

import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.model.feedforward import FeedForward
from shardwise.model.norm import RMSNorm


def apply_liger(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, RMSNorm):
            module.forward = MethodType(_norm, module)  # type: ignore[method-assign]
        elif isinstance(module, FeedForward) and module.gate is not None and module.activation is F.silu:
            module.forward = MethodType(_feed_forward, module)  # type: ignore[method-assign]


def _norm(self: RMSNorm, x: Tensor) -> Tensor:
    from liger_kernel.ops import LigerRMSNormFunction

    in_place = False  # the gradient that arrives may be somebody else's too
    return LigerRMSNormFunction.apply(x, self.weight, self.eps, float(self.plus_one), "gemma", in_place, None)


def _feed_forward(self: FeedForward, x_BTD: Tensor) -> Tensor:
    from liger_kernel.ops import LigerSiLUMulFunction

    assert self.gate is not None
    return self.down(LigerSiLUMulFunction.apply(self.gate(x_BTD), self.up(x_BTD), 1.0, 1.0))
