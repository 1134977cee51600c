"""`search`: the layouts worth running, best first; `explore`: those and what is reported beside them. No torch.

    search(model, cluster, job)  -> list of Candidate, fastest first
    explore(model, cluster, job) -> SearchResult: also what is best per number of GPUs, the Pareto set, what was
                                    rejected and why; when nothing fits, the closest miss and what would

Branch and bound finds them. Read next: space.py (which layouts there are), best_first.py (how they are searched),
regions.py, remedies.py, inverse.py.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

from shardwise.config.values import shown
from shardwise.errors import UserError
from shardwise.plan.layouts.best_first import BestFirst
from shardwise.plan.layouts.candidate import Candidate, Counts
from shardwise.plan.layouts.pareto import pareto
from shardwise.plan.layouts.regions import Region, regions
from shardwise.plan.layouts.remedies import Remedy, remedies
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction.stack import Stack
from shardwise.spec.cluster import HEADROOM, ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec

__all__ = ["Candidate", "Counts", "Region", "Remedy", "SearchResult", "explore", "memory_limit", "search"]

SEVERAL, FEWER = 64, 16
"""Beyond so many GPUs, numbers of them that are so many times smaller than all are not reported beside the ranking;
inverse.py looks at all."""

LEANER = (0.5,)
"""Shares of the memory limit: the Pareto set also has the fastest layouts that keep to these."""


@dataclass(frozen=True)
class SearchResult:
    """What a search has found: the best layouts, what is reported beside them, and why others are not among them."""

    candidates: list[Candidate]  # fastest first: the best layout of each family (same degrees and ZeRO stage)
    limit: int  # bytes of memory that one device may use
    pareto: list[Candidate] = field(default_factory=list)  # nobody is better in time, memory, GPUs and cost per token
    by_gpus: dict[int, Candidate] = field(default_factory=dict)  # the fastest that uses so many
    regions: list[Region] = field(default_factory=list)
    closest_miss: Candidate | None = None  # when nothing fits: what needs the least memory
    remedies: list[Remedy] = field(default_factory=list)  # when nothing fits: what would
    counts: Counts = field(default_factory=Counts)
    # For further questions over the same layouts.
    engine: BestFirst | None = field(default=None, repr=False, compare=False)


def search(model: ModelSpec, cluster: ClusterSpec, job: Job, top: int = 5) -> list[Candidate]:
    """Returns the fastest layouts that fit, one of each family."""
    return explore(model, cluster, job, top, detail=False).candidates


def explore(
    model: ModelSpec,
    cluster: ClusterSpec,
    job: Job,
    top: int = 5,
    *,
    detail: bool | None = None,
    stack: Stack | None = None,
) -> SearchResult:
    """Returns the fastest layouts and what is reported beside them. `detail`: also what is best per number of GPUs, the
    Pareto set and the regions; by default if more than one layout is asked for."""
    began = time.perf_counter()
    engine = _engine(model, cluster, job, stack)
    candidates = engine.best(top)
    counts = replace(engine.counts)  # of the ranking; what is reported beside it looks at the same layouts again
    if not candidates:
        check_not_empty(engine.space)
        miss = engine.smallest(engine.space.gpu_counts)
        ways = remedies(model, cluster, job, _first)
        counts.seconds = time.perf_counter() - began
        return SearchResult([], engine.limit, closest_miss=miss, remedies=ways, counts=counts, engine=engine)
    by_gpus, rejected, trade_offs = {}, [], []
    if top > 1 if detail is None else detail:
        winner = candidates[0]
        for gpus in sorted(reported_counts(engine.space.gpu_counts)):
            if best := [winner] if gpus == winner.plan.world else engine.best(1, [gpus]):
                by_gpus[gpus] = best[0]
        rejected = regions(engine, candidates[0])
        lean = [found for share in LEANER for found in engine.within(int(share * engine.limit)).best(1)]
        trade_offs = pareto([*candidates, *by_gpus.values(), *lean])
    counts.seconds = time.perf_counter() - began
    return SearchResult(candidates, engine.limit, trade_offs, by_gpus, rejected, counts=counts, engine=engine)


def reported_counts(counts: list[int]) -> list[int]:
    """Returns the numbers of GPUs whose best layout is reported: of a large cluster those that are not far from all of
    them."""
    most = max(counts)
    return counts if most <= SEVERAL else [gpus for gpus in counts if gpus * FEWER >= most]


def fastest(model: ModelSpec, cluster: ClusterSpec, job: Job, devices: int | None = None) -> Candidate | None:
    """Returns the fastest layout of all that fit, or of those that use so many devices; None where none fits."""
    return next(iter(_engine(model, cluster, job).best(1, [devices] if devices else None)), None)


def memory_limit(cluster: ClusterSpec, job: Job) -> int:
    """Returns the bytes that a rank may use."""
    asked = job.constraints.get("memory.limit", "auto")
    return int(HEADROOM * (cluster.device.memory if asked == "auto" else int(asked)))


def _engine(model: ModelSpec, cluster: ClusterSpec, job: Job, stack: Stack | None = None) -> BestFirst:
    return BestFirst(Space(model, cluster, job, asked_for(job.constraints)), memory_limit(cluster, job), stack)


def _first(model: ModelSpec, cluster: ClusterSpec, job: Job) -> Candidate | None:
    try:
        return next(iter(_engine(model, cluster, job).best(1)), None)
    except UserError:
        return None


def asked_for(constraints: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the constraints without those that leave everything open."""
    return {key: value for key, value in constraints.items() if value is not None and value != "auto"}


def check_not_empty(space: Space) -> None:
    """Raises where constraints leave no layout at all, and names the one, or the two, that do."""
    if any(True for _ in space.some_grids()):
        return

    def is_empty(*keys: str) -> bool:
        fixed = {key: space.fixed[key] for key in keys}
        return not any(True for _ in Space(space.model, space.cluster, space.job, fixed).some_grids())

    batch = f"a batch of {space.job.global_batch} x {space.job.seq_len} tokens"
    what = f"{space.model.name}, {space.cluster.world} devices and {batch}"
    for count in (1, 2):
        for keys in combinations(space.fixed, count):
            if is_empty(*keys):
                said = [f"{key}={shown(space.fixed[key])}" for key in keys]
                raise UserError(
                    f"{said[0]} leaves no layout" if count == 1 else f"{said[0]} and {said[1]} exclude each other",
                    why=f"no layout of {what} has {'it' if count == 1 else 'both'}",
                    fix=f"leave out {' or '.join(keys)}",
                )
    raise UserError(
        "the constraints leave no layout",
        why=f"no layout of {what} has "
        f"{', '.join(f'{key}={shown(value)}' for key, value in space.fixed.items())} together",
        fix=f"leave out one of {', '.join(space.fixed)}"
        if space.fixed
        else "a larger --batch or other sequence lengths",
    )
