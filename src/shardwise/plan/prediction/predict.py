"""What a job will need and how long a step will take: memory, time, and how sure that is. No torch.

    predict(model, cluster, job, plan) -> Prediction

Read next: memory.py, step_time.py.
"""

from __future__ import annotations

from shardwise.plan.prediction.confidence import interval, outside
from shardwise.plan.prediction.memory import fullest, predict_elsewhere, predict_stages
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.step_time import step_seconds
from shardwise.plan.resolve.speed import stack_of
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction


def predict(model: ModelSpec, cluster: ClusterSpec, job: Job, plan: Plan, stack: Stack | None = None) -> Prediction:
    """Returns the bytes of every rank at its peak, the seconds of a step, and how sure they are. `stack`: of another
    framework; by default our runtime, with the tricks that the plan says."""
    stack = stack or stack_of(plan)
    stages = predict_stages(model, plan, job.optimizer, job.adapter, stack)
    elsewhere = predict_elsewhere(model, plan, job.optimizer, job.adapter)
    step = step_seconds(model, cluster, job, plan, stack)
    likely, unseen = interval(model, cluster, plan, sum(step.values())), outside(model, cluster, plan)
    return Prediction(fullest(stages).parts, step, elsewhere, likely, unseen, stages)
