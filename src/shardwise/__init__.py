"""Shardwise trains language models split over many devices.

Names are loaded on first use, so that `import shardwise` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Callback": "shardwise.api.callbacks",
    "ClusterSpec": "shardwise.spec.cluster",
    "Config": "shardwise.spec.schema",
    "Job": "shardwise.spec.job",
    "ModelSpec": "shardwise.spec.model",
    "Plan": "shardwise.spec.plan",
    "Run": "shardwise.api.trained",
    "RunFailed": "shardwise.api.training",
    "StopTraining": "shardwise.api.callbacks",
    "UserError": "shardwise.errors",
    "load": "shardwise.api.training",
    "parallelize": "shardwise.parallel.any_module.parallelize",
    "train": "shardwise.api.training",
    "verify": "shardwise.api.proving",
}
__all__ = [*_EXPORTS, "__version__", "plan"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    if name == "plan":  # the package of the planner, which can be called
        return import_module("shardwise.plan")
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
