"""Watches the memory of a run's first two steps, and of these alone: what a rank holds at its fullest moment, and how
it rises and falls.

The second step is the first one with everything in place (optimizer state, DDP's final buckets), so it is the one that
is drawn and reported. `run.events_every=0` turns it off. Invariant: a run that is watched computes the same bits, with
the same kernels.

What watches every operation keeps torch from compiling, for good: a block that is first called under it is never
compiled. So compiled blocks are not looked into. On CUDA the allocator says how much there was, and the owners how much
of it is theirs when all gradients are there. On a CPU, whose allocator says nothing, autograd tells what it keeps for
backward; what kernels have in between is not seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from shardwise.memory.account import Account
from shardwise.memory.points import CATEGORIES, OverLimit, Point, thinned
from shardwise.memory.usage import peak_bytes, resident_bytes
from shardwise.parallel.engine import Engine
from shardwise.run.clock import Clock
from shardwise.run.memory_owners import owners_of

MAX_POINTS = 300
MEASURED = (*CATEGORIES, "reserved", "peak")
"""Rows of the report, each in bytes. `reserved` is, on a CPU, the process besides its tensors; on CUDA, what the
allocator keeps free for later. `peak` is the most at one moment, as the system or the allocator says."""


class MemoryWatch:
    """Watches one rank's memory during some steps, and refuses a step that needs more than its limit."""

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        clock: Clock,
        steps: range,
        limit: int | None,
        process_bytes: int,
    ):
        """`limit` is the number of bytes that a rank may use, None for no limit. `process_bytes` is what a bare process
        needs besides tensors."""
        self.device, self.steps = engine.mesh.device, steps
        self.account = Account(self.device, owners_of(engine, optimizer), clock)
        self.limit, self.bare_process = limit, process_bytes
        self.is_compiled, self.accumulates = _compiles(engine, optimizer), engine.plan.num_microbatches > 1
        self.is_open, self.activations, self.tensors = False, 0, 0

    @contextmanager
    def during(self, step: int) -> Iterator[None]:
        """Watches what runs inside, which is one step; does nothing for steps that are not watched."""
        if step not in self.steps:
            yield
            return
        account = self.account
        account.label(everything=True)
        self.process = _process_bytes(self.bare_process, sum(account.held.values()))
        account.limit = None if self.limit is None else self.limit - self.process
        account.records = step == self.steps[-1] and not self.is_compiled
        account.begin()
        self.is_open = True
        try:
            with self._looking():
                yield
        except OverLimit as error:
            raise error.beside(self.process) from None
        except (torch.OutOfMemoryError, MemoryError) as error:
            largest = account.largest()
            total = account.peak.total
            raise OverLimit(total, self.limit or total, account.now(), largest, str(error).splitlines()[0]) from None
        finally:
            self.is_open = False

    def _looking(self) -> AbstractContextManager[Any]:
        if not self.is_compiled:
            return self.account
        return nullcontext() if self.device.type == "cuda" else self.account.of_saved()

    def gradients_are_here(self) -> None:
        """Looks at what is held between backward and update, in a watched step with compiled blocks; called in every
        step."""
        if not (self.is_open and self.is_compiled):
            return
        before = self.account.peak
        self.account.label(everything=True)
        self.account.peak = self.account.now()
        self.tensors = max(before.total, self.account.peak.total)
        held = self.account.peak.by_category()
        if self.device.type == "cpu":
            self.activations = before.by_category()["activations"]
            return
        # The fullest moment was at a backward's start, when the gradients of earlier micro-batches were there, if any.
        others = sum(held.values()) - (0 if self.accumulates else held["gradients"])
        self.activations = max(0, peak_bytes(self.device) - others)

    def curve(self, step: int) -> list[Point]:
        """Returns the moments of the step that was recorded; an empty list for other steps."""
        if not self.steps or step != self.steps[-1]:
            return []
        return thinned(self.account.points, MAX_POINTS)

    def measured(self) -> list[int]:
        """Returns bytes in the order of MEASURED. Categories are full at different moments, so they may add up to more
        than the peak."""
        peak, held = peak_bytes(self.device), self.account.fullest()
        beside = max(0, peak - max(self.tensors, self.account.peak.total))
        if self.is_compiled:
            held["activations"] = self.activations
        if self.device.type == "cuda":
            if not self.is_compiled:
                held["temporary"] += beside  # what kernels take for themselves
            beside = torch.cuda.max_memory_reserved(self.device) - peak
        return [*held.values(), beside, peak]


def _compiles(engine: Engine, optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether a step runs compiled code: in its blocks, or in torchao's update, which on GPUs is compiled
    around a learning rate that is a tensor."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return engine.plan.compile != "none" or (engine.mesh.device.type == "cuda" and any(map(torch.is_tensor, rates)))


def _process_bytes(bare: int, tensors: int) -> int:
    """Returns the bytes that the process needs besides tensors. They are never more than those of a bare one: the holes
    that earlier tensors left are filled again."""
    resident = resident_bytes()
    return bare if resident is None else max(0, min(bare, resident - tensors))
