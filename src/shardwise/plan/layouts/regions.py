"""The alternatives to the winner: for every value that an axis could have had, the best layout with it and what that
costs. No torch.

Degrees (tp, cp, pp, ep) are reported with everything else chosen anew. What a layout does with given degrees (ZeRO
stage, schedule, micro-batch, recomputation, offloading) is reported for the winner's degrees. All of them on as many
GPUs as the winner has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.config.units import format_bytes
from shardwise.plan.layouts.best_first import Accept, BestFirst
from shardwise.plan.layouts.candidate import Candidate
from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction.collectives import PARTS_OF_AXES, placement
from shardwise.spec.cluster import ClusterSpec


@dataclass(frozen=True)
class Region:
    """All layouts with one value that the winner does not have, reported by the best of them."""

    axis: str  # as the layout string and the config call it: tp, pp, zero, recompute, schedule, micro_batch, ...
    value: str
    reason: str  # one line: what it costs more, or how far over the memory it is and by what
    candidate: Candidate | None  # the fastest that fits; if none does, the one that needs the least memory
    slower: float | None  # its step over the winner's; None: it does not fit

    @property
    def what(self) -> str:
        return f"{self.axis}={self.value}"


DEGREES = ("tp", "cp", "pp", "ep")


def regions(engine: BestFirst, winner: Candidate) -> list[Region]:
    found = []
    for axis, value in _values(engine.space, winner):
        accept = _only(axis, value, winner)
        best = engine.best(1, [winner.plan.world], accept)
        if best:
            slower = best[0].prediction.step_s / winner.prediction.step_s
            reason = why_slower(engine.space.cluster, best[0], winner)
            found.append(Region(axis, str(value), reason, best[0], slower))
        elif miss := engine.smallest([winner.plan.world], accept):
            found.append(Region(axis, str(value), why_too_large(miss, engine.limit), miss, None))
    return found


def _values(space: Space, winner: Candidate) -> Iterator[tuple[str, object]]:
    plan = winner.plan
    grids = list(space.grids(plan.world))
    for axis in DEGREES:
        for value in sorted({getattr(grid, axis) for grid in grids} - {getattr(plan, axis)}):
            yield axis, value
    mine = grid_of(winner)
    yield from (("zero", value) for value in sorted({s.zero for s in space.states(mine)} - {plan.zero}))
    yield from (
        ("schedule", name) for name in dict.fromkeys(n for n, _ in space.pipelines(plan.pp)) if name != plan.schedule
    )
    yield from (("micro_batch", size) for size in sorted(space.sizes(mine)) if size != plan.micro_batch)
    yield from (
        ("recompute", mode) for mode in dict.fromkeys(s.recompute for s in space.savings) if mode != plan.recompute
    )
    yield from (
        ("offload", place) for place in dict.fromkeys(s.offload for s in space.savings) if place != plan.offload
    )


def grid_of(candidate: Candidate) -> Grid:
    plan = candidate.plan
    return Grid(plan.dp, plan.tp, plan.sequence, plan.cp, plan.cp_kind, plan.pp, plan.ep)


def _only(axis: str, value: object, winner: Candidate) -> Accept:
    mine = grid_of(winner)

    def accept(grid: Grid, pace: Pace | None, states: States | None, saving: Saving | None) -> bool:
        if axis in DEGREES:
            return bool(getattr(grid, axis) == value)
        if grid != mine:
            return False
        part = {"zero": states, "schedule": pace, "micro_batch": pace}.get(axis, saving)
        return part is None or getattr(part, axis) == value

    return accept


def why_slower(cluster: ClusterSpec, other: Candidate, winner: Candidate) -> str:
    """Returns by how much a step is slower and which parts grew most, with the links that their collectives now use."""
    step, base = other.prediction.step, winner.prediction.step
    ratio = other.prediction.step_s / winner.prediction.step_s
    more = {name: step.get(name, 0.0) - base.get(name, 0.0) for name in {*step, *base}}
    grown = sorted((name for name in more if more[name] > 0.002 * winner.prediction.step_s), key=lambda n: -more[n])[:2]
    words = [f"{name} {more[name]:+.3g} s{_over(cluster, name, other, winner)}" for name in grown]
    return f"{100 * (ratio - 1):+.1f} %" + (f": {', '.join(words)}" if words else "")


def _over(cluster: ClusterSpec, part: str, other: Candidate, winner: Candidate) -> str:
    """Returns the links that a part's collectives use where the winner's stay on others; else an empty text."""
    axis = PARTS_OF_AXES.get(part)
    now, before = ({p.link.name for p in placement(cluster, c.plan) if p.name == axis} for c in (other, winner))
    return f" (over {', '.join(sorted(now))})" if now - before else ""


def why_too_large(miss: Candidate, limit: int) -> str:
    parts = sorted(miss.prediction.memory.items(), key=lambda item: -item[1])
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts[:2] if size > 0)
    return f"{format_bytes(miss.prediction.memory_bytes)} of {format_bytes(limit)}: {held}"
