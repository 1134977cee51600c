"""Defines `Job`: what is to be trained, apart from the model and the machines. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from shardwise.spec.plan import Plan
from shardwise.spec.schema import AdapterConfig, Config

WHOLE = AdapterConfig()
"""Means that all weights are trained, without adapters."""


@dataclass(frozen=True)
class Job:
    """What is to be trained, how much of it, and what the layout must respect."""

    seq_len: int
    global_batch: int  # sequences per optimizer step
    tokens: int | None = None  # that are trained in all; None: only steps are predicted
    precision: str = "bf16"
    optimizer: str = "adamw"
    adapter: AdapterConfig = WHOLE
    constraints: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))  # config key -> value
    price: float | None = None  # per device and hour; None: the cluster's own
    attention: str = "sdpa"  # sdpa | flash4 | measured: the faster of both, found as the run starts

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len


def job_of(config: Config, plan: Plan) -> Job:
    """Returns the job that a run was planned for."""
    return Job(plan.seq_len, plan.global_batch, None, plan.precision, config.optimizer.name, config.adapter)
