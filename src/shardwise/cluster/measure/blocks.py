"""Holds `BlockTimes`: how long a model's own blocks took on this machine, as run/block_times.py measures them. No torch
here."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan


@dataclass(frozen=True)
class BlockTimes:
    """Seconds that one micro-batch and one update took."""

    spec: ModelSpec  # whose blocks they are: a rank's slice of the model
    plan: Plan  # which they were measured in: one micro-batch in one process
    model_s: float  # seconds of forward and backward of all layers and both ends
    optimizer_s: float | None  # seconds of norm and update of `elements`; None: the optimizer is not on the device
    elements: int  # that the optimizer was timed on
