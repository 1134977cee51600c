"""Which layers backward computes again together (activation checkpointing), and where saved activations can wait. No torch.

Invariant: what the runtime wraps (memory/recompute.py) is what is predicted; both ask here.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise

from shardwise.errors import UserError


@lru_cache(4096)
def segments(mode: str, layers: range) -> tuple[range, ...]:
    """The neighbouring layers of a stage that are computed again together, by their number in the model. Empty where nothing is, or
    where a choice is made inside of each block (`selective`)."""
    if mode == "full":
        mode = "every-1"
    if mode.startswith("every-"):
        return tuple(range(index, index + 1) for index in layers if index % int(mode.removeprefix("every-")) == 0)
    if mode != "sqrt":
        return ()
    count = max(1, round(math.sqrt(len(layers))))
    starts = [layers.start + len(layers) * number // count for number in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def check_activation_offload(device: str, where: str | None = None) -> None:
    """Refuses to move activations of a model that is in CPU memory already. `where`: file and line of the setting."""
    if device == "cpu":
        raise UserError(
            "`memory.activation_offload = true` has nothing to move on a CPU",
            why="it takes activations from a GPU's memory to the CPU's, where they are already",
            fix="memory.activation_offload=false memory.recompute=full",
            where=where,
        )
