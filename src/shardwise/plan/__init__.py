"""The planner: `predict` says what a layout needs and how long a step takes, `search` finds the layouts worth running.

Names are loaded on first use: who only needs a `Plan` does not load the planner.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.plan.layouts.search import search as search
    from shardwise.plan.prediction.predict import predict as predict

_EXPORTS = {"predict": "shardwise.plan.prediction.predict", "search": "shardwise.plan.layouts.search"}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'shardwise.plan' has no attribute {name!r}")


class _CallablePackage(ModuleType):
    """`shardwise.plan("llama3-8b", "8xh100")` asks the planner (api/planning.py)."""

    def __call__(self, *args: Any, **keys: Any) -> Any:
        return import_module("shardwise.api.planning").plan(*args, **keys)


sys.modules[__name__].__class__ = _CallablePackage
