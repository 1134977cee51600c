"""What a rank sends to others and how long it waits for it: the one way in which every collective is counted and
timed.

    with traffic.wait("all-reduce", "tp", out.nbytes):      # around the call, or around `work.wait()` of an earlier one
        dist.all_reduce(out, group=group)

The name says what the collective does, the axis who takes part (dp, shard, tp, cp, ep, pp, world), the bytes are
those of its whole buffer. Only what stands inside counts as waiting: copies before and after stay outside. While a
step's clock has a span open, each wait becomes a span inside it, with its micro-batch and stage. At any other time
(evaluation, generation, a hand-written loop) nothing is recorded. `traffic.on("tp")` is the same for one axis, for
functions that take a `wait`.

On a GPU the host does not wait: the clock then records events on the current stream on both sides, and no call here
synchronises. Invariant: one wait for each collective of a step, and waits do not contain each other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

Wait = Callable[[str, int], AbstractContextManager[Any]]
"""Takes (name, bytes) and returns a context around the wait."""


def unseen(name: str, num_bytes: int) -> AbstractContextManager[Any]:
    """Returns a context that records nothing: the `Wait` for collectives outside of a run."""
    return nullcontext()


@dataclass
class Traffic:
    """Records waits; and, for data parallelism only, counts the all-gathers of parameters, the reductions of gradients
    and their bytes since the start."""

    gathers: int = 0
    reductions: int = 0
    num_bytes: int = 0
    clock: Any = None  # a run's Clock; the pipeline sets it when a step begins

    def wait(self, name: str, axis: str, num_bytes: int) -> AbstractContextManager[Any]:
        """Returns a context around a wait, which becomes a span of the step's clock."""
        if self.clock is None or not self.clock.open:
            return nullcontext()
        return self.clock.span("comm_exposed", name, group=axis, num_bytes=num_bytes)

    def on(self, axis: str) -> Wait:
        """Returns `wait` for one axis, as a function of (name, bytes)."""
        return partial(_wait_on, self, axis)

    # Where no line of ours stands around the wait, because torch waits: two moments of the clock ---------------------

    def moment(self) -> Any:
        """Returns the present moment of the clock, for `waited`; None without a clock."""
        return None if self.clock is None else self.clock.moment()

    def waited(self, name: str, axis: str, num_bytes: int, start: Any, end: Any) -> None:
        """Records a wait between two moments as a span of the clock."""
        if start is not None and self.clock is not None and self.clock.open:
            self.clock.add("comm_exposed", name, start, end, group=axis, num_bytes=num_bytes)


def _wait_on(traffic: Traffic, axis: str, name: str, num_bytes: int) -> AbstractContextManager[Any]:
    return traffic.wait(name, axis, num_bytes)
