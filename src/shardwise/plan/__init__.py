"""The planner: `predict` says what a layout needs and how long a step takes, `search` finds the layouts worth running.

Names are loaded on first use: who only needs a `Plan` does not load the planner.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {"predict": "shardwise.plan.prediction.predict", "search": "shardwise.plan.layouts.search"}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'shardwise.plan' has no attribute {name!r}")
