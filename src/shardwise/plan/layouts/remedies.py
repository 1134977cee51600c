"""What would make a job fit that does not: changes that were tried, those that keep the losses first. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cluster.describe.changes import changed
from shardwise.errors import UserError
from shardwise.plan.layouts.candidate import Candidate
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.precisions import PRECISIONS

MOST_GPUS = 64
"""Times the GPUs that there are."""

SHORTEST = 512  # tokens

Find = Callable[[ModelSpec, ClusterSpec, Job], Candidate | None]
"""The fastest layout that fits."""


@dataclass(frozen=True)
class Remedy:
    """A change after which a job fits that does not fit as it is: it was tried."""

    what: str  # in words: "16 GPUs", "without parallel.tp=2", "train.seq_len=4096"
    change: dict[str, Any]  # config key -> value; "gpus" -> number; None: left out
    candidate: Candidate
    same_losses: bool  # whether the training stays the same


def remedies(model: ModelSpec, cluster: ClusterSpec, job: Job, find: Find) -> list[Remedy]:
    """One of each kind, the mildest that fits."""
    found = []
    for kind in (_without_a_constraint, _more_gpus, _shorter, _other_training):
        for what, change, other_cluster, other_job in kind(model, cluster, job):
            candidate = find(model, other_cluster, other_job)
            if candidate is not None:
                found.append(Remedy(what, change, candidate, kind in (_without_a_constraint, _more_gpus)))
                if kind is not _without_a_constraint:
                    break
    return found


Try = tuple[str, dict[str, Any], ClusterSpec, Job]


def _without_a_constraint(model: ModelSpec, cluster: ClusterSpec, job: Job) -> Iterator[Try]:
    for key, value in job.constraints.items():
        rest = {name: one for name, one in job.constraints.items() if name != key}
        yield f"without {key}={value}", {key: None}, cluster, replace(job, constraints=rest)


def _more_gpus(model: ModelSpec, cluster: ClusterSpec, job: Job) -> Iterator[Try]:
    times = 2
    while times <= MOST_GPUS:
        try:
            larger = changed(cluster, {"nodes": cluster.nodes * times})
        except UserError:  # nobody knows what would join them
            return
        yield f"{larger.world} GPUs", {"gpus": larger.world}, larger, job
        times *= 2


def _shorter(model: ModelSpec, cluster: ClusterSpec, job: Job) -> Iterator[Try]:
    """As many tokens per step, in shorter sequences."""
    length = job.seq_len // 2
    while length >= SHORTEST:
        batch = job.tokens_per_step // length
        yield (
            f"train.seq_len={length}",
            {"train.seq_len": length},
            cluster,
            replace(job, seq_len=length, global_batch=batch),
        )
        length //= 2


def _other_training(model: ModelSpec, cluster: ClusterSpec, job: Job) -> Iterator[Try]:
    if job.adapter.kind == "none":
        for kind in ("lora",) if PRECISIONS[job.precision].is_fp8 else ("lora", "qlora"):
            yield (
                f"adapter.kind={kind}",
                {"adapter.kind": kind},
                cluster,
                replace(job, adapter=replace(job.adapter, kind=kind)),
            )
    if job.optimizer in ("adam", "adamw"):
        yield "optimizer.name=adamw8bit", {"optimizer.name": "adamw8bit"}, cluster, replace(job, optimizer="adamw8bit")
