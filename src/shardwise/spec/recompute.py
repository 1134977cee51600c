"""Says which layers backward computes again together (activation checkpointing), and where saved activations can wait.
No torch.

Invariant: what the runtime wraps (memory/recompute.py) is what is predicted; both ask here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from types import MappingProxyType

from shardwise.errors import UserError


@dataclass(frozen=True)
class Recompute:
    """One value of `memory.recompute`: what backward computes again instead of keeping it."""

    name: str
    every: int | None = None
    """Every so-many-th block is computed again as a whole, from its inputs; None: no block is, by itself."""
    is_selective: bool = False
    """Whether what is cheap between matmuls and attention is computed again, in each block."""
    in_groups: bool = False
    """Whether neighbouring blocks are computed again together: sqrt(L) groups of sqrt(L)."""

    @property
    def is_none(self) -> bool:
        """Whether everything is kept."""
        return self.every is None and not self.is_selective and not self.in_groups


RECOMPUTE: Mapping[str, Recompute] = MappingProxyType(
    {
        record.name: record
        for record in (
            Recompute("none"),
            Recompute("full", every=1),
            Recompute("selective", is_selective=True),
            Recompute("sqrt", in_groups=True),
        )
    }
)
"""The modes by name. `every-K` is one besides: see `recompute_of`."""
EVERY_K = "every-K"
"""What the config's choices call every-1, every-2, ..."""
CONSIDERED = ("none", "every-4", "every-2", "selective", "full", "sqrt")
"""The modes that the planner chooses from, the cheapest in time first."""


@lru_cache(64)
def recompute_of(mode: str) -> Recompute:
    """Returns the record of a word of `memory.recompute`."""
    if mode.startswith("every-"):
        return Recompute(mode, every=int(mode.removeprefix("every-")))
    return RECOMPUTE[mode]


@lru_cache(4096)
def segments(mode: str, layers: range) -> tuple[range, ...]:
    """Returns the neighbouring layers of a stage that are computed again together, by their number in the model. It is
    empty where nothing is, or where a choice is made inside of each block (`selective`)."""
    kind = recompute_of(mode)
    if kind.every is not None:
        return tuple(range(index, index + 1) for index in layers if index % kind.every == 0)
    if not kind.in_groups:
        return ()
    count = max(1, round(math.sqrt(len(layers))))
    starts = [layers.start + len(layers) * number // count for number in range(count + 1)]
    return tuple(range(start, stop) for start, stop in pairwise(starts))


def check_activation_offload(device: str, where: str | None = None) -> None:
    """Refuses to move activations of a model that is in CPU memory already. `where` is the file and line of the
    setting."""
    if device == "cpu":
        raise UserError(
            "`memory.activation_offload = true` has nothing to move on a CPU",
            why="it takes activations from a GPU's memory to the CPU's, where they are already",
            fix="memory.activation_offload=false memory.recompute=full",
            where=where,
        )
