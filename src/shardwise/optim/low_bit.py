"""Builds an 8-bit optimizer: AdamW with quantized states of one byte per element, torchao's AdamW8bit on plain local
shards; on CUDA one pass updates them (kernels/triton/low_bit_adamw.py).

A state is cut into blocks of 256 elements, each stored as 8-bit codes and one fp32 scale: 2.03 bytes per parameter
instead of 8. The update itself is computed in fp32. Blocks are cut from what a rank holds, so another layout may
quantize its states in other blocks. Tensors that are small or do not divide into blocks keep their states in fp32;
`kept_in_fp32` counts them. Invariant: what leaves (`dequantized`) is fp32, what comes back is cut into blocks again,
so checkpoints know nothing of 8 bits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError
from shardwise.kernels.low_bit_codes import BLOCK
from shardwise.optim.master_weights import LowPrecisionOf
from shardwise.spec.extras import LOWBIT_INSTALL

SMALLEST = 4096
"""Elements of a tensor below which 8 bits save nothing worth their quantization error (torchao's rule, and
bitsandbytes')."""


def is_quantized(parameter: Tensor) -> bool:
    """Returns whether a tensor's states are kept in 8 bits."""
    return parameter.numel() >= SMALLEST and parameter.numel() % BLOCK == 0


def kept_in_fp32(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """Returns how many trained tensors keep fp32 states, and how many elements they have together."""
    sizes = [p.numel() for p in parameters if p.requires_grad and not is_quantized(p)]
    return len(sizes), sum(sizes)


def dequantized(value: Tensor) -> Tensor:
    """Returns a state in fp32: 8-bit codes become what they stand for, anything else stays as it is."""
    return value.dequantize() if hasattr(value, "codes") else value


def adamw8bit(
    groups: list[dict[str, Any]],
    lr: float,
    betas: tuple[float, float],
    eps: float,
    low_precision_of: LowPrecisionOf = MappingProxyType({}),
) -> torch.optim.Optimizer:
    """Returns AdamW over these groups with 8-bit states. With `low_precision_of`, on CUDA the update writes the 16-bit
    weights of fp32 masters too."""
    for group in groups:
        for parameter in group["params"]:
            _check_format(parameter)
    load_torchao()
    from shardwise.optim.low_bit_optimizer import BlockAdamW

    optimizer = BlockAdamW(groups, lr=lr, betas=betas, eps=eps)
    optimizer.low_precision_of = low_precision_of
    return optimizer


def _check_format(parameter: nn.Parameter) -> None:
    """Refuses parameters that an fp32 update would round."""
    if parameter.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return
    name = str(parameter.dtype).removeprefix("torch.")
    raise UserError(
        f"optimizer.name = adamw8bit cannot train {name} parameters",
        why="its update is computed in fp32, which would round them; 8-bit states are for fp32, bf16 and fp16",
        fix="optimizer.name=adamw or memory.precision=fp32",
    )


def load_torchao() -> None:
    """Imports torchao, or refuses in three lines. Its import warns about compiled parts that nothing here uses."""
    noise = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in noise]
    for logger in noise:
        logger.setLevel(logging.CRITICAL)
    try:
        import torchao.optim  # noqa: F401
    except ImportError as error:
        raise UserError(
            "torchao is not installed", why=f"8-bit states are torchao's: {error}", fix=LOWBIT_INSTALL
        ) from None
    finally:
        for logger, level in zip(noise, levels, strict=True):
            logger.setLevel(level)
