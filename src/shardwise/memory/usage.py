"""Says how many bytes this process has used at most, and how many one forward pass saves for backward."""

from __future__ import annotations

import os
import sys

import torch
from torch import nn


def peak_bytes(device: torch.device) -> int:
    """Returns the most bytes that this process has used: on CUDA the allocator's peak, on a CPU the largest resident
    set of the process, 0 where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """Returns the bytes that the process has in memory now; None where the system does not say."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return None


def saved_bytes(model: nn.Module, *inputs: torch.Tensor, **named: torch.Tensor) -> int:
    """Returns the bytes that one forward pass keeps for backward, counted storage by storage; weights do not count."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(*inputs, **named)  # held until the count is done, so that no storage is freed and reused
    del outputs
    return sum(seen.values())
