"""Questions the other way round: how many GPUs are enough, and what a budget buys. No torch.

fewest_gpus(model, cluster, job)                     the fewest on which anything fits
fewest_gpus(model, cluster, job, within=30 * DAY)    ... and that are through with job.tokens in time
under_budget(model, cluster, job, 500_000)           the fastest layout whose training costs no more
"""

from __future__ import annotations

import math

from shardwise.plan.layouts.best_first import BestFirst
from shardwise.plan.layouts.candidate import Candidate
from shardwise.plan.layouts.search import asked_for, memory_limit
from shardwise.plan.layouts.space import Space
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec

DAY, HOUR = 86400.0, 3600.0


def training_seconds(job: Job, candidate: Candidate) -> float:
    """Of all tokens of the job."""
    assert job.tokens is not None, "how long a training takes depends on its tokens"
    return math.ceil(job.tokens / job.tokens_per_step) * candidate.prediction.step_s


def training_cost(cluster: ClusterSpec, job: Job, candidate: Candidate) -> float:
    """In the currency of the price per GPU and hour."""
    price = job.price if job.price is not None else cluster.price
    assert price is not None, "what a training costs depends on the price"
    return training_seconds(job, candidate) / HOUR * candidate.plan.world * price


def best_by_gpus(model: ModelSpec, cluster: ClusterSpec, job: Job) -> dict[int, Candidate]:
    """The fastest layout of each number of GPUs on which anything fits, ascending."""
    engine = BestFirst(Space(model, cluster, job, asked_for(job.constraints)), memory_limit(cluster, job))
    found = {gpus: engine.best(1, [gpus]) for gpus in sorted(engine.space.gpu_counts)}
    return {gpus: best[0] for gpus, best in found.items() if best}


def fewest_gpus(model: ModelSpec, cluster: ClusterSpec, job: Job, within: float | None = None) -> Candidate | None:
    for candidate in best_by_gpus(model, cluster, job).values():
        if within is None or training_seconds(job, candidate) <= within:
            return candidate
    return None


def under_budget(model: ModelSpec, cluster: ClusterSpec, job: Job, budget: float) -> Candidate | None:
    paid = [c for c in best_by_gpus(model, cluster, job).values() if training_cost(cluster, job, c) <= budget]
    return min(paid, key=lambda candidate: candidate.prediction.step_s, default=None)
