"""Answers what a rank asks the planner while it sets up (run/planner.py). All of it is prediction; nothing is measured
here."""

from __future__ import annotations

from shardwise.cluster.measure.blocks import BlockTimes
from shardwise.memory.micro_batch import MicroBatchMemory
from shardwise.plan.prediction.lifetimes import PROCESS_BYTES
from shardwise.plan.prediction.measured_rates import scaled_cluster
from shardwise.plan.prediction.memory import measured_need, states_bytes
from shardwise.plan.prediction.predict import predict
from shardwise.plan.prediction.states import COMPUTE_BYTES, WEIGHT_BYTES, gradient_bytes, state_bytes
from shardwise.plan.resolve.usual import micro_batch_sizes
from shardwise.run.planner import Forecast
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import job_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config


class RunPlanner:
    """Answers for the runs of one config on one kind of device."""

    def __init__(self, config: Config, spec: ModelSpec, device: str):
        self.config, self.spec = config, spec
        self.process_bytes = PROCESS_BYTES[device]

    def micro_batch_sizes(self, plan: Plan) -> list[int]:
        return micro_batch_sizes(plan)

    def needed_bytes(self, plan: Plan, taken: MicroBatchMemory, pp_rank: int) -> int:
        states = states_bytes(self.spec, plan, self.config.optimizer.name, self.config.adapter)
        return measured_need(self.spec, plan, states, taken.activations, taken.temporary, pp_rank)

    def forecast(self, plan: Plan, cluster: ClusterSpec, times: BlockTimes | None) -> Forecast:
        job, optimizer = job_of(self.config, plan), self.config.optimizer.name
        if times is not None:
            cluster = scaled_cluster(cluster, self.spec, plan, job, times)
        held = {
            "weights": WEIGHT_BYTES[plan.precision],
            "low_precision": COMPUTE_BYTES[plan.precision] if plan.copies else 0,
            "gradients": gradient_bytes(plan),
            "optimizer": state_bytes(optimizer, plan.precision),
        }
        return Forecast(predict(self.spec, cluster, job, plan), cluster, held)
