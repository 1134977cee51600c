"""What all ranks agree on between two steps: whether to stop, how many targets the next step has, whether a checkpoint is due.

Each rank hands in small numbers, which are added up; most of the time they travel in a message that is on its way anyway (`ask` in loop.py).
Invariant: every rank comes to the same answer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.errors import Exit
from shardwise.spec.plan import Plan


def wishes(wish: Exit | None) -> list[int]:
    return [int(wish == Exit.INTERRUPTED), int(wish == Exit.STOPPED)]


def answer(sums: list[int]) -> tuple[Exit, int, bool]:
    """Whether to stop (DONE: nobody wants to), the next step's target tokens, whether to save. One rank's wish is everyone's."""
    interrupted, stopped, num_targets, save = sums
    return Exit.INTERRUPTED if interrupted else Exit.STOPPED if stopped else Exit.DONE, num_targets, bool(save)


def summed(values: list[int], device: torch.device, plan: Plan) -> list[int]:
    if plan.world == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def largest(value: float, device: torch.device, plan: Plan) -> float:
    if plan.world == 1:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def from_all(values: list[int], device: torch.device, plan: Plan) -> list[list[int]]:
    """Every rank's values, on every rank."""
    if plan.world == 1:
        return [values]
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    found = [torch.empty_like(mine) for _ in range(plan.world)]
    dist.all_gather(found, mine)
    return [tensor.tolist() for tensor in found]
