"""The largest micro-batch that fits: measured, not guessed. Every rank must come to the same answer.

On CUDA each candidate runs a real forward and backward pass, and running out of memory is caught. On a CPU running out would
kill the process, so one sequence's activations are counted and multiplied.
"""

from __future__ import annotations

import gc

import torch

from shardwise.memory.usage import saved_bytes
from shardwise.model.decoder import IGNORE, Decoder
from shardwise.plan.predict import ALLOCATOR_SHARE

HEADROOM = 0.9  # of the limit; the rest is for fragmentation and what torch allocates on the side


def find_micro_batch(model: Decoder, *, rows: int, seq_len: int, state_bytes: int, limit: int) -> int:
    """`state_bytes`: weights, gradients and optimizer state, which stay beside the activations. At least 1."""
    sizes = [n for n in range(rows, 0, -1) if rows % n == 0]
    device = next(model.parameters()).device
    if device.type == "cuda":
        return next((n for n in sizes if _fits_on_cuda(model, n, seq_len, state_bytes, limit, device)), 1)
    per_sequence = saved_bytes(model, *_dummy(1, seq_len, device)) * (1 + ALLOCATOR_SHARE["cpu"])
    return next((n for n in sizes if state_bytes + n * per_sequence <= HEADROOM * limit), 1)


def _fits_on_cuda(model: Decoder, size: int, seq_len: int, state_bytes: int, limit: int, device: torch.device) -> bool:
    weights = sum(p.nbytes for p in model.parameters())
    torch.cuda.reset_peak_memory_stats(device)
    try:
        losses = model(*_dummy(size, seq_len, device))
        sum(losses).backward()
        needed = torch.cuda.max_memory_allocated(device) - 2 * weights + state_bytes
        return needed <= HEADROOM * limit
    except torch.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _dummy(size: int, seq_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens without targets: they cost what real ones cost and leave no trace in router statistics."""
    tokens = torch.zeros(size, seq_len, dtype=torch.long, device=device)
    return tokens, torch.full_like(tokens, IGNORE)
