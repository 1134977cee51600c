"""Keeps what a library changes in torch to that library's own steps.

DeepSpeed's ZeRO-3 replaces `torch.nn.functional.linear` for the whole process, for good. In one process with other
variants that would slow them all, so whatever building a variant changes in torch is taken back, and put in place
around its steps. Only functions and classes that existed before count; caches, counters and late imports are not
changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

OWNERS: tuple[Any, ...] = (
    torch,
    torch.autograd,
    torch.Tensor,
    torch.nn,
    torch.nn.functional,
    torch.nn.init,
    torch.nn.Parameter,
    torch.nn.Module,
    torch.nn.Linear,
    torch.nn.Embedding,
    torch.nn.parallel.DistributedDataParallel,
    torch.nn.utils,
    torch.optim.Optimizer,
    torch.optim.AdamW,
    dist,
    distributed_c10d,
)

Place = tuple[Any, str]


class Patches:
    """What one variant changed in torch: place -> (before, after)."""

    def __init__(self) -> None:
        self.changed: dict[Place, tuple[Any, Any]] = {}

    @property
    def names(self) -> list[str]:
        return sorted(f"{getattr(owner, '__name__', owner)}.{name}" for owner, name in self.changed)

    @contextmanager
    def collect(self) -> Iterator[None]:
        """Around building: notes the changes and takes them back, threads and environment included."""
        before, environment, threads = _snapshot(), dict(os.environ), torch.get_num_threads()
        try:
            yield
        finally:
            after = _snapshot()
            places = [place for place, old in before.items() if place in after and after[place] is not old]
            self.changed = {place: (before[place], after[place]) for place in places}
            self._set(0)
            os.environ.clear()
            os.environ.update(environment)
            torch.set_num_threads(threads)

    @contextmanager
    def applied(self) -> Iterator[None]:
        self._set(1)
        try:
            yield
        finally:
            self._set(0)

    def _set(self, which: int) -> None:
        for (owner, name), values in self.changed.items():
            setattr(owner, name, values[which])


def _snapshot() -> dict[Place, Any]:
    return {(o, name): value for o in OWNERS for name, value in vars(o).items() if callable(value)}
