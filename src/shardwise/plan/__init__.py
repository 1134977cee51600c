"""The planner: `predict` says what a layout needs and how long a step takes, `search` finds the layouts worth running.

The package itself can be called: `shardwise.plan("llama3-8b", "8xh100", seq=8192)` returns ranked layouts (`Plans`).
Names are loaded on first use: who only needs a `Plan` does not load the planner.
"""

from __future__ import annotations

import sys
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwise.plan.layouts.search import search as search
    from shardwise.plan.prediction.predict import predict as predict

_EXPORTS = {"predict": "shardwise.plan.prediction.predict", "search": "shardwise.plan.layouts.search"}
__all__ = [*_EXPORTS]


def __getattr__(name: str) -> Any:
    if name == "__signature__":  # what help and notebooks show of the call
        return signature(import_module("shardwise.api.planning").plan)
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module 'shardwise.plan' has no attribute {name!r}")


class _CallablePackage(ModuleType):
    """`shardwise.plan("llama3-8b", "8xh100")` asks the planner (api/planning.py)."""

    def __call__(self, *args: Any, **keys: Any) -> Any:
        return import_module("shardwise.api.planning").plan(*args, **keys)


sys.modules[__name__].__class__ = _CallablePackage
