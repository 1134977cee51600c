"""Declares what a rank asks the planner while it sets up. `launch` hands in who answers, so that `run` imports no
planner.

Read next: launch/planner.py, which answers; measured_cluster.py and micro_batch_search.py, which measure what the
questions are about.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shardwise.cluster.measure.blocks import BlockTimes
from shardwise.memory.micro_batch import MicroBatchMemory
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction


@dataclass(frozen=True)
class Forecast:
    """What is predicted of a run before its first step."""

    prediction: Prediction
    cluster: ClusterSpec  # this machine as it was measured, which the prediction is for
    bytes_per_parameter: Mapping[str, float]  # of a trained one: weights, low_precision, gradients, optimizer


class Planner(Protocol):
    """Whoever answers these questions, for one run."""

    process_bytes: int
    """The bytes that a process needs besides its tensors."""

    def micro_batch_sizes(self, plan: Plan) -> list[int]:
        """Returns the micro-batches to choose from, in sequences, largest first."""

    def needed_bytes(self, plan: Plan, taken: MicroBatchMemory, pp_rank: int) -> int:
        """Returns the bytes that a rank of this stage needs for `plan`, when one micro-batch takes as much as was
        measured."""

    def forecast(self, plan: Plan, cluster: ClusterSpec, times: BlockTimes | None) -> Forecast:
        """Returns the prediction for this machine. `cluster` has rates and link as measured; `times` are those of the
        model's own blocks, which the prediction is scaled by."""
