"""Shardwise trains language models split over many devices.

Names are loaded on first use, so that `import shardwise` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "ClusterSpec": "shardwise.cluster.spec",
    "Config": "shardwise.config.schema",
    "Job": "shardwise.plan.job",
    "ModelSpec": "shardwise.model.spec",
    "Plan": "shardwise.plan.plan",
    "UserError": "shardwise.errors",
    "parallelize": "shardwise.parallel.any_module",
}
__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
