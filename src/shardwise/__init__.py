"""Shardwise trains language models split over many devices.

Names are loaded on first use, so that `import shardwise` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # the same names for editors and type checkers; a test compares them
    from shardwise.api.callbacks import Callback as Callback
    from shardwise.api.callbacks import StepInfo as StepInfo
    from shardwise.api.callbacks import StopTraining as StopTraining
    from shardwise.api.planning import PlannedLayout as PlannedLayout
    from shardwise.api.planning import Plans as Plans
    from shardwise.api.planning import plan as plan
    from shardwise.api.proving import Proven as Proven
    from shardwise.api.proving import verify as verify
    from shardwise.api.trained import Run as Run
    from shardwise.api.trained import Trained as Trained
    from shardwise.api.training import RunFailed as RunFailed
    from shardwise.api.training import load as load
    from shardwise.api.training import train as train
    from shardwise.errors import UserError as UserError
    from shardwise.parallel.any_module.parallelize import parallelize as parallelize
    from shardwise.spec.cluster import ClusterSpec as ClusterSpec
    from shardwise.spec.job import Job as Job
    from shardwise.spec.model import ModelSpec as ModelSpec
    from shardwise.spec.plan import Plan as Plan
    from shardwise.spec.schema import Config as Config

__version__ = "0.1.0"

_EXPORTS = {
    "Callback": "shardwise.api.callbacks",
    "ClusterSpec": "shardwise.spec.cluster",
    "Config": "shardwise.spec.schema",
    "Job": "shardwise.spec.job",
    "ModelSpec": "shardwise.spec.model",
    "Plan": "shardwise.spec.plan",
    "PlannedLayout": "shardwise.api.planning",
    "Plans": "shardwise.api.planning",
    "Proven": "shardwise.api.proving",
    "Run": "shardwise.api.trained",
    "RunFailed": "shardwise.api.training",
    "StepInfo": "shardwise.api.callbacks",
    "StopTraining": "shardwise.api.callbacks",
    "Trained": "shardwise.api.trained",
    "UserError": "shardwise.errors",
    "load": "shardwise.api.training",
    "parallelize": "shardwise.parallel.any_module.parallelize",
    "train": "shardwise.api.training",
    "verify": "shardwise.api.proving",
}
__all__ = [*_EXPORTS, "__version__", "plan"]


if not TYPE_CHECKING:  # or every name would be known to type checkers, misspelt ones too

    def __getattr__(name: str) -> Any:
        if name in _EXPORTS:
            return getattr(import_module(_EXPORTS[name]), name)
        if name == "plan":  # the package of the planner, which can be called
            return import_module("shardwise.plan")
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
