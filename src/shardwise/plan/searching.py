"""`search`: the layouts worth running, best first; `explore`: those and the rest of the story. No torch.

search(model, cluster, job)  -> list of Candidate, fastest first
explore(model, cluster, job) -> SearchResult: also what is best per GPU count, the Pareto set, and what was rejected and why
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardwise.cluster.spec import ClusterSpec
from shardwise.model.spec import ModelSpec
from shardwise.plan.job import Job
from shardwise.plan.plan import Plan
from shardwise.plan.prediction import Prediction


@dataclass(frozen=True)
class Candidate:
    """A layout with what is predicted of it."""

    plan: Plan
    prediction: Prediction


@dataclass(frozen=True)
class Region:
    """All layouts with one value that the winner does not have, told by the best of them."""

    axis: str  # as the layout string and the config call it: tp, pp, zero, recompute, schedule, micro_batch, gpus, ...
    value: str
    reason: str  # one line: what it costs more, or how far over the memory it is and by what
    candidate: Candidate | None  # the fastest that fits; if none does, the one that needs the least memory
    slower: float | None  # its step over the winner's; None: it does not fit

    @property
    def what(self) -> str:
        return f"{self.axis}={self.value}"


@dataclass(frozen=True)
class Remedy:
    """A change after which a job fits that does not fit as it is: it was tried."""

    what: str  # in words: "16 GPUs", "memory.offload=optimizer", "train.seq_len=4096"
    change: dict[str, object]  # config key -> value; "gpus" -> number
    candidate: Candidate
    same_losses: bool  # whether the training stays the same


@dataclass
class Counts:
    """The work of one search. A layout is considered when it, or a region that it lies in, was looked at."""

    considered: int = 0
    too_large: int = 0  # in regions whose smallest member does not fit
    too_slow: int = 0  # in regions whose fastest member cannot win a place
    evaluated: int = 0  # predicted exactly
    seconds: float = 0.0


@dataclass(frozen=True)
class SearchResult:
    candidates: list[Candidate]  # fastest first: the best layout of each family (same degrees and ZeRO stage)
    limit: int  # bytes of memory that one device may use
    pareto: list[Candidate] = field(default_factory=list)  # nobody is better in time, memory, GPUs and cost per token
    by_gpus: dict[int, Candidate] = field(default_factory=dict)  # the fastest that uses so many
    regions: list[Region] = field(default_factory=list)
    closest_miss: Candidate | None = None  # when nothing fits: what needs the least memory
    remedies: list[Remedy] = field(default_factory=list)  # when nothing fits: what would
    counts: Counts = field(default_factory=Counts)


def search(model: ModelSpec, cluster: ClusterSpec, job: Job, top: int = 10) -> list[Candidate]:
    """The fastest layouts that fit, one of each family."""
    return explore(model, cluster, job, top).candidates


def explore(model: ModelSpec, cluster: ClusterSpec, job: Job, top: int = 10) -> SearchResult:
    raise NotImplementedError
