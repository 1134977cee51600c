"""`BlockTimes`: how long a model's own blocks took on this machine, as run/block_times.py measures them. No torch
here."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan


@dataclass(frozen=True)
class BlockTimes:
    spec: ModelSpec  # whose blocks they are: a rank's slice of the model
    plan: Plan  # one micro-batch of it in one process
    model_s: float  # forward and backward of the whole of it
    optimizer_s: float | None  # norm and update of so many elements; None: the optimizer is not on the device
    elements: int
