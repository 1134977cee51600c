"""What a job will need and how long a step will take: memory, time, and how sure that is. No torch.

    predict(model, cluster, job, plan) -> Prediction

Read next: memory.py, step_time.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.plan.prediction.confidence import interval, outside
from shardwise.plan.prediction.lifetimes import StageMemory
from shardwise.plan.prediction.memory import fullest, predict_elsewhere, predict_stages
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.step_time import step_seconds
from shardwise.plan.resolve.speed import stack_of
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan


@dataclass(frozen=True)
class Prediction:
    memory: dict[str, int]  # bytes per rank by category
    step: dict[str, float]  # seconds by part
    elsewhere: dict[str, int] = field(default_factory=dict)  # offloaded bytes per rank: host, disk
    likely: tuple[float, float] = (1.0, 1.0)  # factors on the step between which 8 of 10 measured ones lay
    outside: tuple[str, ...] = ()  # what of it was never measured
    stages: tuple[StageMemory, ...] = ()  # memory of each rank along the pipeline; `memory` is that of the fullest

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())

    @property
    def step_s(self) -> float:
        return sum(self.step.values())

    @property
    def low(self) -> float:
        """Seconds that one step of ten goes below."""
        return self.step_s * self.likely[0]

    @property
    def high(self) -> float:
        return self.step_s * self.likely[1]

    def to_dict(self) -> dict[str, object]:
        return {
            "memory_bytes": self.memory_bytes,
            "memory": self.memory,
            "elsewhere": self.elsewhere,
            "stages": [stage.to_dict() for stage in self.stages],
            "step_s": self.step_s,
            "step": self.step,
            "likely": list(self.likely),
            "outside": list(self.outside),
        }


def predict(model: ModelSpec, cluster: ClusterSpec, job: Job, plan: Plan, stack: Stack | None = None) -> Prediction:
    """`stack`: of another framework; by default our runtime, with the tricks that the plan says."""
    stack = stack or stack_of(plan)
    stages = predict_stages(model, plan, job.optimizer, job.adapter, stack)
    elsewhere = predict_elsewhere(model, plan, job.optimizer, job.adapter)
    step = step_seconds(model, cluster, job, plan, stack)
    likely, unseen = interval(model, cluster, plan, sum(step.values())), outside(model, cluster, plan)
    return Prediction(fullest(stages).parts, step, elsewhere, likely, unseen, stages)
