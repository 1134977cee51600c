"""Single layouts of a space: the memory they need, whether they fit, what is predicted of them. Kept from question to
question. No torch.

Read next: memory.py, predict.py.
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
from shardwise.plan.remembered import remembered
from shardwise.plan.resolve.speed import stack_of
from shardwise.spec.plan import Plan

JUST_BELOW = 1 - 1e-12


class Layouts:
    """Single layouts with their memory and their prediction. `stack`: another framework's; None: ours."""

    def __init__(self, space: Space, stack: Stack | None, counts: Counts):
        self.space, self.stack, self.counts = space, stack, counts

    @remembered
    def is_too_large(self, plan: Plan, limit: int) -> bool:
        model, job = self.space.model, self.space.job
        fitting = self.first_rank(plan) <= limit and fits(model, plan, job.optimizer, job.adapter, limit)
        return not fitting or not self.fits_on_host(plan)

    @remembered
    def first_rank(self, plan: Plan) -> int:
        """Returns the bytes of the first rank of a pipeline: it is most often the fullest, and one is enough to know
        that a layout does not fit."""
        model, job = self.space.model, self.space.job
        share = rank_shares(model, plan)[0]
        groups = groups_of(share, model, job.adapter)
        return rank_memory(share, groups, plan, job.optimizer, self.stack or stack_of(plan)).peak

    @remembered
    def memory_of(self, plan: Plan) -> int:
        job = self.space.job
        return sum(predict_memory(self.space.model, plan, job.optimizer, job.adapter).values())

    def fits_on_host(self, plan: Plan) -> bool:
        """Returns whether what is offloaded finds room in CPU memory."""
        if (plan.offload == "none" and not plan.activation_offload) or plan.device == "cpu":
            return True
        job = self.space.job
        away = predict_elsewhere(self.space.model, plan, job.optimizer, job.adapter)
        return away["host"] <= self.space.cluster.host_room(plan.world)

    @remembered
    def seconds(self, plan: Plan) -> float:
        """Returns the seconds of a step, summed in another order: below the prediction by no more than float error."""
        space, stack = self.space, self.stack or stack_of(plan)
        parts = step_seconds(space.model, space.cluster, space.job, plan, stack, apart=False)
        return sum(parts.values()) * JUST_BELOW

    @remembered
    def predicted(self, plan: Plan) -> Candidate:
        self.counts.evaluated += 1
        space = self.space
        return Candidate(plan, predict(space.model, space.cluster, space.job, plan, self.stack))
