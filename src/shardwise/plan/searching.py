"""`search`: the layouts worth running, best first. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.cluster.spec import ClusterSpec
from shardwise.model.spec import ModelSpec
from shardwise.plan.job import Job
from shardwise.plan.plan import Plan
from shardwise.plan.prediction import Prediction


@dataclass(frozen=True)
class Candidate:
    """A layout with what is predicted of it."""

    plan: Plan
    prediction: Prediction


def search(model: ModelSpec, cluster: ClusterSpec, job: Job, top: int = 10) -> list[Candidate]:
    raise NotImplementedError
