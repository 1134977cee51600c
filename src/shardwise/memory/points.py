"""Describes moments of a step: how many bytes of each category a rank holds, and what happens where that is too
much."""

from __future__ import annotations

from typing import Any, NamedTuple

CATEGORIES = ("parameters", "buffers", "gradients", "optimizer", "activations", "temporary")


class Point(NamedTuple):
    """One moment. `during` is the clock's innermost open span, None outside of spans."""

    at: float  # seconds by the clock of time.perf_counter
    held: tuple[int, ...]  # bytes, in the order of CATEGORIES
    during: Any

    @property
    def total(self) -> int:
        """The bytes of all categories together."""
        return sum(self.held)

    def by_category(self) -> dict[str, int]:
        """Returns the bytes of each category by its name."""
        return dict(zip(CATEGORIES, self.held, strict=True))


class OverLimit(MemoryError):
    """Is raised when there is no more memory: `needed` of `limit` bytes at the moment `at`. `largest` are the storages
    that take most; `said` are the system's words."""

    def __init__(self, needed: int, limit: int, at: Point, largest: list[tuple[str, int]], said: str = ""):
        super().__init__(said or f"{needed} bytes of {limit}")
        self.needed, self.limit, self.at, self.largest, self.said = needed, limit, at, largest, said

    def beside(self, process: int) -> OverLimit:
        """Returns the same error with `process` bytes added, which the process takes besides tensors."""
        return OverLimit(self.needed + process, self.limit + process, self.at, self.largest)


def thinned(points: list[Point], most: int) -> list[Point]:
    """Returns at most `most` points: the first, the last, and of equal stretches of time in between the fullest moment
    each."""
    if len(points) <= most:
        return list(points)
    first, last = points[0], points[-1]
    width = max(last.at - first.at, 1e-9) / (most - 2)
    fullest: dict[int, Point] = {}
    for point in points[1:-1]:
        slot = min(int((point.at - first.at) / width), most - 3)
        if slot not in fullest or point.total > fullest[slot].total:
            fullest[slot] = point
    return [first, *(fullest[slot] for slot in sorted(fullest)), last]
