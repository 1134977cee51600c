"""Lets all ranks agree, between two steps, whether to stop, how many targets the next step has and whether a checkpoint
is due.

Each rank hands in small numbers, which are added up; most of the time they travel in the all-reduce that carries a
step's norm and losses anyway (`ask` in step.py). Where results are read late, what follows a step was asked one step
earlier. Invariant: every rank comes to the same answer.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.data.loader import Loader, StepBatch
from shardwise.errors import Exit
from shardwise.run.checkpoints import CheckpointClock
from shardwise.run.clock import Clock
from shardwise.run.guards import StopRequests
from shardwise.spec.plan import Plan


class Agreed(NamedTuple):
    """What all ranks have agreed on for the time after a step."""

    stop: Exit  # DONE where no rank asks to stop
    num_targets: int  # target tokens of the next step, over all ranks
    save: bool  # whether a checkpoint is written after the step


class Agreement:
    """Asks this rank's questions ahead of time, keeps the batches that were read for them and the answers that were not
    used yet."""

    def __init__(
        self,
        loader: Loader,
        stops: StopRequests,
        checkpoint: CheckpointClock,
        clock: Clock,
        *,
        done: int,  # steps of earlier processes
        num_steps: int,
        is_first: bool,  # the rank that looks at the checkpoint's clock
        counts_targets: bool,
    ):
        self.loader, self.stops, self.checkpoint, self.clock = loader, stops, checkpoint, clock
        self.num_steps, self.is_first, self.counts_targets = num_steps, is_first, counts_targets
        self._about = done - 1  # the step after which what was last asked is settled
        self._batches: deque[StepBatch | None] = deque()
        self._agreed: deque[Agreed] = deque()

    def ask(self) -> list[int]:
        """Reads this rank's rows of a step to come; returns its stop requests, its targets and whether it wants a
        checkpoint before that step, to be added up over all ranks."""
        self._about += 1
        with self.clock.span("data_wait", "next batch"):
            self._batches.append(self.loader.next() if self._about < self.num_steps else None)
        batch = self._batches[-1]
        targets = batch.num_targets if batch and self.counts_targets else 0
        return [*stop_votes(self.stops.check()), targets, int(self.is_first and self.checkpoint.due(self._about))]

    def settle(self, sums: list[int]) -> None:
        """Takes in what `ask` returned, added up over all ranks: it decides what follows a step."""
        self._agreed.append(agreed(sums))

    def next(self) -> Agreed:
        """Returns what follows the step that has been finished; before the first step, whether there is one."""
        return self._agreed.popleft()

    def next_batch(self) -> StepBatch:
        """Returns this rank's rows of the next step, which `ask` has read."""
        batch = self._batches.popleft()
        assert batch is not None, f"no batch was read for the step after {self._about}"
        return batch


def stop_votes(request: Exit | None) -> list[int]:
    """Returns two votes of this rank, each 0 or 1: for ending by Ctrl-C, and for a clean stop."""
    return [int(request == Exit.INTERRUPTED), int(request == Exit.STOPPED)]


def agreed(sums: list[int]) -> Agreed:
    """Returns what follows from the votes of all ranks: a request of one rank counts for all."""
    interrupted, stopped, num_targets, save = sums
    stop = Exit.INTERRUPTED if interrupted else Exit.STOPPED if stopped else Exit.DONE
    return Agreed(stop, num_targets, bool(save))


def summed(values: list[int], device: torch.device, plan: Plan) -> list[int]:
    """Collective. Returns the values added up over all ranks."""
    if plan.world == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def largest(value: float, device: torch.device, plan: Plan) -> float:
    """Collective. Returns the largest of all ranks' values."""
    if plan.world == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def from_all(values: list[int], device: torch.device, plan: Plan) -> list[list[int]]:
    """Collective. Returns every rank's values, on every rank."""
    if plan.world == 1:
        return [values]
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(plan.world)]
    dist.all_gather(found, mine)
    return [tensor.tolist() for tensor in found]
