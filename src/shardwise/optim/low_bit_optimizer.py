"""Runs torchao's AdamW8bit the way this package needs it. To be imported after `low_bit.load_torchao`, which says what
is missing.

On CUDA one pass updates a tensor, its states and its low-precision weight (kernels/triton/low_bit_adamw.py). Elsewhere
torchao's own arithmetic runs chunk by chunk. Read next: low_bit.py for the invariant, low_bit_update.py for what an
update computes.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torchao.optim import AdamW8bit
from torchao.optim.adam import single_param_adam
from torchao.optim.subclass_8bit import OptimState8bit

from shardwise.kernels.low_bit_codes import BLOCK, SMALLEST_SCALE, nearest
from shardwise.optim.fused_adamw import has_kernel
from shardwise.optim.low_bit import dequantized, is_quantized
from shardwise.optim.low_bit_update import scalars_of
from shardwise.optim.master_weights import LowPrecisionOf, take_gradient

CHUNK = 2**18
"""The elements that are updated at a time without the kernel: looking their codes up takes several bytes each."""


class BlockAdamW(AdamW8bit):
    """Is torchao's class, but for what is said at each method."""

    grad_factor: Tensor | None = None  # what the next step multiplies gradients by
    low_precision_of: LowPrecisionOf = MappingProxyType({})

    def _new_buffer(self, p: Tensor, signed: bool) -> Tensor:
        """Returns an empty state: in 8 bits where it is quantized, else in fp32, also for 16-bit weights."""
        if not is_quantized(p):
            return torch.zeros_like(p, dtype=torch.float32)
        return OptimState8bit.zeros(p.shape, signed, BLOCK, p.device, dtype=p.dtype)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Updates by one kernel per tensor on CUDA, where there is Triton. Elsewhere it is the same arithmetic, chunk
        by chunk: compiling takes longer than most runs on a CPU, and needs a C++ compiler."""
        factor, self.grad_factor = self.grad_factor, None
        for group in self.param_groups:
            if group["params"][0].is_cuda and has_kernel():
                from shardwise.kernels.triton.low_bit_adamw import update  # Triton takes seconds to load

                self._step_at_once(group, factor, update)
                continue
            for p in group["params"]:
                if p.grad is not None:
                    self._step_in_chunks(p, group, factor)

    def _step_at_once(self, group: dict[str, Any], factor: Tensor | None, update: Any) -> None:
        scalars: dict[int, Tensor] = {}
        for p in group["params"]:
            gradient = take_gradient(p, self.low_precision_of)
            if gradient is None:
                continue
            state = self._state_of(p)
            count = int(state["step"])
            if count not in scalars:
                scalars[count] = scalars_of(group, count, p.device)
            update(
                p,
                self.low_precision_of.get(p),
                gradient,
                factor,
                scalars[count],
                (state["exp_avg"], state["exp_avg_sq"]),
            )

    def _state_of(self, p: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = self._new_buffer(p, True), self._new_buffer(p, False)
        state["step"] += 1
        return state

    def _step_in_chunks(self, p: nn.Parameter, group: dict[str, Any], factor: Tensor | None) -> None:
        state = self._state_of(p)
        assert p.grad is not None
        flat, gradient = p.detach().view(-1), p.grad.reshape(-1)
        for first in range(0, flat.numel(), CHUNK):
            part = slice(first, first + CHUNK)
            moments = [_part(state[key], part) for key in ("exp_avg", "exp_avg_sq")]
            in_fp32 = [dequantized(moment) for moment in moments]
            g = gradient[part] if factor is None else gradient[part] * factor.to(gradient)
            single_param_adam(
                flat[part], g, state["step"], *in_fp32, None,
                group["lr"], *group["betas"], group["weight_decay"], group["eps"], True, False,
            )  # fmt: skip
            for moment, value in zip(moments, in_fp32, strict=True):
                if moment is not value:
                    _put(moment, value, value.view(-1, BLOCK).abs().amax(1))

    def load_state_dict(self, state_dict: Any) -> None:
        """Takes over fp32 states and quantizes them again. Where a block is what it was, its codes are too, and its
        scale but for one rounding."""
        rates = [group["lr"] for group in self.param_groups]
        saved = state_dict["state"]
        super().load_state_dict({**state_dict, "state": {}})
        for group, lr in zip(self.param_groups, rates, strict=True):
            group["lr"] = lr
        parameters = [p for group in self.param_groups for p in group["params"]]
        for number, values in saved.items():
            p = parameters[number]
            self.state[p] = {"step": torch.as_tensor(values["step"], dtype=torch.float32).cpu()}
            for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
                self.state[p][name] = buffer = self._new_buffer(p, signed)
                value = values[name].to(p.device, torch.float32)
                if is_quantized(p):
                    _put(buffer, value, _scale_of(value.reshape(-1, BLOCK), buffer))
                else:
                    buffer.copy_(value)


def _part(state: Tensor, part: slice) -> Tensor:
    if not isinstance(state, OptimState8bit):
        return state.view(-1)[part]
    blocks = slice(part.start // BLOCK, part.stop // BLOCK)
    return OptimState8bit(state.codes.view(-1)[part], state.scale[blocks], state.qmap, state.signed, torch.float32)


def _scale_of(blocks: Tensor, buffer: Any) -> Tensor:
    """Returns the scales of blocks that may have been codes before. torchao takes the largest element of a block; but
    the lowest code stands for -0.993, so a block whose largest element was negative would shrink each time it comes
    by."""
    largest = blocks.amax(1)
    return torch.maximum(largest, blocks.amin(1) / buffer.qmap[0]) if buffer.signed else largest


def _put(buffer: Any, value: Tensor, scale: Tensor) -> None:
    scale = scale.clip(SMALLEST_SCALE)
    buffer.codes.copy_(nearest(value.reshape(-1, BLOCK) / scale[:, None], buffer.qmap).view_as(buffer.codes))
    buffer.scale.copy_(scale)
