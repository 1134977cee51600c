"""Holds what a rank knows before it starts: what is trained, read once, and which rank it is. No torch here.

Invariant: a process has one `Plan`, and it is `RunInputs.plan`. Whoever measures a better split or micro-batch replaces
it there (setup.py); launch, the loop and the engine's mesh refer to the same object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwise.run.heartbeat import Heartbeat
from shardwise.run.own_parts import OwnParts
from shardwise.run.passed_over import PassedOver
from shardwise.run.ranks import Ranks
from shardwise.run.rundir import RunDir

if TYPE_CHECKING:
    import torch

    from shardwise.data.corpus import Corpus
    from shardwise.spec.model import ModelSpec
    from shardwise.spec.plan import Plan
    from shardwise.spec.schema import Config


@dataclass
class RunInputs:
    """The config, shapes, text and plan of a run: read or resolved once per process, then handed on."""

    config: Config
    spec: ModelSpec
    corpus: Corpus
    plan: Plan
    own: OwnParts = field(default_factory=OwnParts, kw_only=True)
    passed_over: PassedOver = field(default_factory=PassedOver, kw_only=True)
    known_origins: Mapping[str, str] | None = field(default=None, kw_only=True)
    """Where each value of the config is from; None: the run directory's config.toml says it."""


@dataclass(frozen=True)
class Session:
    """One rank of a run."""

    run: RunDir
    inputs: RunInputs
    ranks: Ranks
    device: torch.device
    memory_limit: int  # bytes that this rank may use
    from_step: int | None = None  # the checkpoint to resume from; None for the newest
    heartbeat: Heartbeat = field(default_factory=Heartbeat)

    @property
    def config(self) -> Config:
        return self.inputs.config

    @property
    def own(self) -> OwnParts:
        return self.inputs.own

    @property
    def spec(self) -> ModelSpec:
        return self.inputs.spec

    @property
    def corpus(self) -> Corpus:
        return self.inputs.corpus

    @property
    def plan(self) -> Plan:
        return self.inputs.plan
