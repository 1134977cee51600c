"""What a rank asks the planner while it sets up. `launch` hands in who answers, so that `run` imports no planner.

Read next: launch/planner.py, which answers; measured_cluster.py and micro_batch_search.py, which measure what the
questions are about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shardwise.cluster.measure.blocks import BlockTimes
from shardwise.memory.micro_batch import Taken
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction


@dataclass(frozen=True)
class Forecast:
    """What is predicted of a run before its first step."""

    prediction: Prediction
    cluster: ClusterSpec  # this machine as it was measured, which the prediction is for
    bytes_per_parameter: Mapping[str, float]  # of one that is trained: weights, low_precision, gradients, optimizer


class Planner(Protocol):
    process_bytes: int
    """What a process needs besides its tensors, in bytes."""

    def micro_batch_sizes(self, plan: Plan) -> list[int]:
        """Sequences per micro-batch to choose from, largest first."""

    def needed_bytes(self, plan: Plan, taken: Taken, pp_rank: int) -> int:
        """Bytes that a rank of this stage needs for `plan`, when one micro-batch takes as much as was measured."""

    def forecast(self, plan: Plan, cluster: ClusterSpec, times: BlockTimes | None) -> Forecast:
        """The prediction for this machine. `cluster`: rates and link as measured; `times`: of the model's own blocks,
        to scale by."""
