"""What a job will need and how long a step will take: memory, time, and how sure that is. No torch.

    predict(model, cluster, job, plan) -> Prediction

Read next: memory.py, step_time.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.cluster.spec import ClusterSpec
from shardwise.model.spec import ModelSpec
from shardwise.plan.job import Job
from shardwise.plan.memory import predict_elsewhere, predict_memory
from shardwise.plan.plan import Plan
from shardwise.plan.stack import OURS, Stack
from shardwise.plan.step_time import step_seconds


@dataclass(frozen=True)
class Prediction:
    memory: dict[str, int]  # bytes per rank by category
    step: dict[str, float]  # seconds by part
    elsewhere: dict[str, int] = field(default_factory=dict)  # offloaded bytes per rank: host, disk

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        return sum(self.step.values())

    def to_dict(self) -> dict[str, object]:
        return {
            "memory_bytes": self.memory_bytes,
            "memory": self.memory,
            "elsewhere": self.elsewhere,
            "step_s": self.step_s,
            "step": self.step,
        }


def predict(model: ModelSpec, cluster: ClusterSpec, job: Job, plan: Plan, stack: Stack = OURS) -> Prediction:
    memory = predict_memory(model, plan, job.optimizer, job.adapter)
    elsewhere = predict_elsewhere(model, plan, job.optimizer, job.adapter)
    return Prediction(memory, step_seconds(model, cluster, job, plan, stack), elsewhere)
