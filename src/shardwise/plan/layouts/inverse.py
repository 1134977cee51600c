"""Questions the other way round: how many GPUs are enough, and what a budget buys. No torch.

    meeting(engine, Demand(job, cluster), True, 5)                 the fewest GPUs on which anything fits
    meeting(engine, Demand(job, cluster, within=2e6), False, 5)    ... and that are through with job.tokens in time
    meeting(engine, Demand(job, cluster, budget=5e5), False, 5)    the fastest that cost no more

One layout is reported for each number of GPUs: the best of those that meet the demand. Invariant: the same answer as
predicting every layout on every number of GPUs in `Space.finer_counts`, whatever the size of the cluster. A test
compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardwise.plan.layouts.best_first import BestFirst
from shardwise.plan.layouts.candidate import Candidate, number_of_gpus
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job

HOUR = 3600.0


@dataclass(frozen=True)
class Demand:
    """What a training may take: seconds, and money at the price per GPU and hour of the job or of the cluster."""

    job: Job
    cluster: ClusterSpec
    within: float | None = None
    budget: float | None = None

    def longest_step(self, gpus: int) -> float:
        """Returns the seconds that a step on so many GPUs may take."""
        most = math.inf if self.within is None else self.within
        if self.budget is not None:
            price = self.cluster.price if self.job.price is None else self.job.price
            assert price is not None, "what a training costs depends on the price"
            most = min(most, self.budget / (price * gpus / HOUR) if price else math.inf)
        if most == math.inf:
            return most
        assert self.job.tokens is not None, "how long a training takes depends on its tokens"
        return most / math.ceil(self.job.tokens / self.job.tokens_per_step)


def meeting(engine: BestFirst, demand: Demand, fewest: bool, top: int) -> list[Candidate]:
    """Returns at most `top` layouts that meet the demand, of different numbers of GPUs; none where nothing meets it.
    With `fewest`, or a time to keep, the fewest GPUs come first, else the fastest layout does."""
    counts = engine.space.finer_counts
    if not fewest and demand.within is None:
        return engine.best(top, counts, longest=demand.longest_step, group=number_of_gpus)
    found: list[Candidate] = []
    for gpus in counts:
        found += engine.best(1, [gpus], longest=demand.longest_step)
        if len(found) == top:
            break
    return found


def cheapest(engine: BestFirst, demand: Demand) -> Candidate | None:
    """Returns the layout that takes the fewest GPU-seconds of those that are fast enough, whatever the budget."""
    found, least = None, math.inf

    def longest(gpus: int) -> float:
        in_time = Demand(demand.job, demand.cluster, demand.within).longest_step(gpus)
        return min(in_time, least / gpus)

    for gpus in engine.space.finer_counts:
        for candidate in engine.best(1, [gpus], longest=longest):
            if (taken := gpus * candidate.prediction.step_s) < least:
                found, least = candidate, taken
    return found
