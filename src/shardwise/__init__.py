"""Shardwise trains language models split over many devices.

Names are loaded on first use, so that `import shardwise` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "ClusterSpec": "shardwise.spec.cluster",
    "Config": "shardwise.spec.schema",
    "Job": "shardwise.spec.job",
    "ModelSpec": "shardwise.spec.model",
    "Plan": "shardwise.spec.plan",
    "UserError": "shardwise.errors",
    "parallelize": "shardwise.parallel.any_module.parallelize",
}
__all__ = [*_EXPORTS, "__version__"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
