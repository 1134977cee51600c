"""Single layouts of a space: the memory they need, whether they fit, what is predicted of them. Kept from question to
question. No torch.

Read next: memory.py, prediction.py.
"""

from __future__ import annotations

from shardwise.plan.layouts.candidate import Candidate, Counts
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction.lifetimes import rank_memory
from shardwise.plan.prediction.memory import fits, predict_elsewhere, predict_memory
from shardwise.plan.prediction.predict import predict
from shardwise.plan.prediction.rank_share import rank_shares
from shardwise.plan.prediction.stack import Stack
from shardwise.plan.prediction.states import groups_of
from shardwise.plan.prediction.step_time import step_seconds
from shardwise.plan.resolve.speed import stack_of
from shardwise.spec.plan import Plan

JUST_BELOW = 1 - 1e-12


class Layouts:
    """`stack`: of another framework; None: ours."""

    def __init__(self, space: Space, stack: Stack | None, counts: Counts):
        self.space, self.stack, self.counts = space, stack, counts
        self._large: dict[tuple[Plan, int], bool] = {}
        self._first: dict[Plan, int] = {}
        self._memory: dict[Plan, int] = {}
        self._seconds: dict[Plan, float] = {}
        self._predicted: dict[Plan, Candidate] = {}

    def is_too_large(self, plan: Plan, limit: int) -> bool:
        key = (plan, limit)
        if key not in self._large:
            self._large[key] = not self._fits(plan, limit) or not self.fits_on_host(plan)
        return self._large[key]

    def _fits(self, plan: Plan, limit: int) -> bool:
        job = self.space.job
        return self.first_rank(plan) <= limit and fits(self.space.model, plan, job.optimizer, job.adapter, limit)

    def first_rank(self, plan: Plan) -> int:
        """Bytes of the first rank of a pipeline: one is enough to know that a layout does not fit, and it is most often
        the fullest."""
        if plan not in self._first:
            model, job = self.space.model, self.space.job
            share = rank_shares(model, plan)[0]
            groups = groups_of(share, model, job.adapter)
            self._first[plan] = rank_memory(share, groups, plan, job.optimizer, self.stack or stack_of(plan)).peak
        return self._first[plan]

    def memory_of(self, plan: Plan) -> int:
        if plan not in self._memory:
            job = self.space.job
            self._memory[plan] = sum(predict_memory(self.space.model, plan, job.optimizer, job.adapter).values())
        return self._memory[plan]

    def fits_on_host(self, plan: Plan) -> bool:
        """What is offloaded must find room beside the devices."""
        if (plan.offload == "none" and not plan.activation_offload) or plan.device == "cpu":
            return True
        job = self.space.job
        away = predict_elsewhere(self.space.model, plan, job.optimizer, job.adapter)
        return away["host"] <= self.space.cluster.host_share

    def seconds(self, plan: Plan) -> float:
        """Of a step, by its parts' sum in another order: less than what is predicted by a rounding at most."""
        if plan not in self._seconds:
            space, stack = self.space, self.stack or stack_of(plan)
            self._seconds[plan] = sum(
                step_seconds(space.model, space.cluster, space.job, plan, stack, apart=False).values()
            )
        return self._seconds[plan] * JUST_BELOW

    def predicted(self, plan: Plan) -> Candidate:
        if plan not in self._predicted:
            self.counts.evaluated += 1
            space = self.space
            prediction = predict(space.model, space.cluster, space.job, plan, self.stack)
            self._predicted[plan] = Candidate(plan, prediction)
        return self._predicted[plan]
