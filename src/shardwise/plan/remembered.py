"""`remembered`: a method that answers each question once and keeps the answers with its object. No torch.

A search asks the same prices of a million layouts. Invariant: what such a method returns follows from its arguments and
from what never changes in its object.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, cached_property
from types import MethodType
from typing import Any, Concatenate, ParamSpec, TypeVar

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def remembered(method: Callable[Concatenate[Any, Asked], Answer]) -> cached_property[Callable[Asked, Answer]]:
    """Returns the method as an attribute that is made at its first use: the method bound to its object, with a cache of
    that object's own."""

    def bound(of: object) -> Callable[Asked, Answer]:
        kept: Callable[Asked, Answer] = cache(MethodType(method, of))  # type: ignore[assignment]
        return kept

    return cached_property(bound)
