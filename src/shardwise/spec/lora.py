"""Says which adapters are added by one kernel. No torch.

Invariant: what the runtime does (kernels/lora_add.py) is what is predicted; both ask here.
"""

from __future__ import annotations


def adds_in_one_kernel(rank: int) -> bool:
    """Returns whether one kernel computes y + (x A^T) B^T for adapters of this rank, in 16 bits: rows of B begin at
    whole 16 bytes, and one program holds all columns of B at once."""
    return rank % 8 == 0 and rank <= 256
