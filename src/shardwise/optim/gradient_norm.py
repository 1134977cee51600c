"""Computes squared norms of many tensors, for the gradient norm (`grad_norm`) of a step.

On a GPU large tensors go through one kernel each (kernels/triton/gradient_norm.py), which reads them at the memory's
speed; torch's norms of many tensors at once reach half of it. Invariant: the squared norm of the same tensor is the
same every time on machines of a kind (with a compiler for kernels, or without). It is summed in fp32 or wider: in 16
bits it would keep 8 or 11 bits, and that of scaled fp16 gradients would overflow.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.kernels.gated import uses_kernel

LEAST_ELEMENTS = 1 << 20  # a tensor of fewer takes no longer than a launch


def squared_norms(tensors: list[Tensor]) -> Tensor:
    """Returns the sum of squares of each tensor, as one fp64 vector. All tensors are on one device."""
    is_large = [
        tensor.numel() >= LEAST_ELEMENTS and uses_kernel(tensor) and tensor.is_contiguous() for tensor in tensors
    ]
    large, small = (
        [t for t, is_one in zip(tensors, is_large, strict=True) if is_one is kind] for kind in (True, False)
    )
    found = {True: iter(_by_kernel(large)), False: iter(_by_torch(small))}
    return torch.stack([next(found[is_one]) for is_one in is_large])


def _by_torch(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    if not tensors:
        return ()
    dtype = None if all(tensor.dtype.itemsize > 2 for tensor in tensors) else torch.float32
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=dtype)).double().square().unbind()


def _by_kernel(tensors: list[Tensor]) -> tuple[Tensor, ...]:
    if not tensors:
        return ()
    from shardwise.kernels.triton.gradient_norm import shares  # Triton takes seconds to load

    return shares(tensors).sum(1, dtype=torch.float64).unbind()
