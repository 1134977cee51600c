"""What would make a job fit that does not: the one list of changes, which `plan` and `train` try before they report
them. No torch.

    layout_changes      how the same training is laid out; the search has tried all of these itself
    more_ranks          as many times the ranks as there are devices for
    other_trainings     another number format, optimizer or adapter: the losses are not the same any more

Invariant: a `Remedy` was tried, by the search here or by the planner of a run in resolve/fit.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardwise.cluster.describe.changes import changed
from shardwise.config.units import format_bytes
from shardwise.errors import UserError
from shardwise.plan.layouts.candidate import Candidate
from shardwise.plan.prediction.figures import step_text
from shardwise.plan.resolve.refusal import Asked, Fix
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.precisions import PRECISIONS

CHANGES_LOSSES = ("optimizer.name", "memory.precision", "adapter.kind", "train.seq_len")
"""Keys after which a run does not compute the same losses any more: offered after all others."""

MOST_GPUS = 64
"""Times the GPUs that there are."""

SHORTEST = 512  # tokens

Find = Callable[[ModelSpec, ClusterSpec, Job], Candidate | None]
"""The fastest layout that fits."""


@dataclass(frozen=True)
class Remedy:
    """A change after which a job fits that does not fit as it is."""

    change: Fix  # config key -> value; "--nproc", "gpus" -> number; None: the constraint is left out
    what: str  # in words: "16 GPUs", "without parallel.tp=2", "train.seq_len=4096"
    memory_bytes: int  # of the fullest rank
    step_s: float
    before_s: float | None = None  # a step of the job as it was asked for, where that could be priced

    @property
    def same_losses(self) -> bool:
        return not any(key in CHANGES_LOSSES for key in self.change)

    @property
    def slower(self) -> float:
        """Returns the step's time over that of the job as it was asked for."""
        assert self.before_s is not None, self
        return self.step_s / self.before_s

    @property
    def cost(self) -> str:
        step = (
            f"{step_text(self.step_s)} per step"
            if self.before_s is None
            else f"{100 * (self.slower - 1):+.0f} % step time"
        )
        return f"{format_bytes(self.memory_bytes)}, {step}"


# The list ------------------------------------------------------------------------------------------------------------


def layout_changes(asked: Asked, plan: Plan) -> Iterator[Fix]:
    """Yields single changes to the layout. Of several values for one key the mildest comes first."""
    config = asked.config
    if config.train.micro_batch != "auto":
        yield from ({"train.micro_batch": n} for n in range(plan.micro_batch - 1, 0, -1) if plan.rows_per_rank % n == 0)
    if plan.dp * plan.cp > 1 and config.parallel.replicate in ("auto", 1):
        yield from ({"parallel.zero": stage} for stage in range(plan.zero + 1, 4))
    if plan.recompute == "none":
        yield from ({"memory.recompute": kind} for kind in ("selective", "full"))
    if plan.offload == "none":
        yield {"memory.offload": "optimizer"}
    if plan.offload != "all":
        yield {"memory.offload": "all"}
    if config.memory.offload_dir and plan.offload_to == "cpu":
        yield {"memory.offload": "nvme"}
    if not plan.activation_offload and plan.device == "cuda":  # elsewhere activations are in CPU memory already
        yield {"memory.activation_offload": True}


def more_ranks(asked: Asked, plan: Plan, devices: int) -> Iterator[Fix]:
    """Yields the same layout on twice, four times ... as many ranks, up to `devices`."""
    times = 2
    while times * plan.world <= devices:
        started: Fix = {"--nproc": times * asked.nproc} if asked.nproc else {"parallel.dp": plan.dp}
        yield from ({f"parallel.{axis}": times * getattr(plan, axis), **started} for axis in ("tp", "cp", "pp"))
        if plan.zero or asked.config.parallel.zero == "auto":
            yield started if asked.nproc else {"parallel.dp": times * plan.dp}
        times *= 2


def other_trainings(precision: str, optimizer: str, adapter: str, can_adapt: bool) -> Iterator[Fix]:
    """Yields changes to what is trained. `can_adapt`: there are weights that an adapter could be trained beside."""
    if precision == "fp32":
        yield {"memory.precision": "bf16"}
    if adapter == "none" and can_adapt:
        yield from (
            {"adapter.kind": kind} for kind in ("lora", "qlora") if kind == "lora" or not PRECISIONS[precision].is_fp8
        )
    if low_bit := OPTIMIZERS[optimizer].low_bit:
        yield {"optimizer.name": low_bit}
    if optimizer != "sgd":
        yield {"optimizer.name": "sgd"}


# What `plan` says ----------------------------------------------------------------------------------------------------


def remedies(model: ModelSpec, cluster: ClusterSpec, job: Job, find: Find) -> list[Remedy]:
    """Returns one change of each kind, the mildest that fits; of constraints every one that may be left out. Those that
    keep the losses come first."""
    found = []
    for tries, all_of_them in ((_without_a_constraint, True), (_more_gpus, False), (_shorter, False), (_other, False)):
        for what, change, other_cluster, other_job in tries(cluster, job):
            candidate = find(model, other_cluster, other_job)
            if candidate is not None:
                prediction = candidate.prediction
                found.append(Remedy(change, what, prediction.memory_bytes, prediction.step_s))
                if not all_of_them:
                    break
    return found


Try = tuple[str, Fix, ClusterSpec, Job]


def _without_a_constraint(cluster: ClusterSpec, job: Job) -> Iterator[Try]:
    for key, value in job.constraints.items():
        rest = {name: one for name, one in job.constraints.items() if name != key}
        yield f"without {key}={value}", {key: None}, cluster, replace(job, constraints=rest)


def _more_gpus(cluster: ClusterSpec, job: Job) -> Iterator[Try]:
    times = 2
    while times <= MOST_GPUS:
        try:
            larger = changed(cluster, {"nodes": cluster.nodes * times})
        except UserError:  # nobody knows what would join them
            return
        yield f"{larger.world} GPUs", {"gpus": larger.world}, larger, job
        times *= 2


def _shorter(cluster: ClusterSpec, job: Job) -> Iterator[Try]:
    """Yields jobs with as many tokens per step, in shorter sequences."""
    length = job.seq_len // 2
    while length >= SHORTEST:
        shorter = replace(job, seq_len=length, global_batch=job.tokens_per_step // length)
        yield f"train.seq_len={length}", {"train.seq_len": length}, cluster, shorter
        length //= 2


def _other(cluster: ClusterSpec, job: Job) -> Iterator[Try]:
    for fix in other_trainings(job.precision, job.optimizer, job.adapter.kind, can_adapt=True):
        ((key, value),) = fix.items()
        if key in job.constraints:
            continue
        changes: dict[str, Any] = {
            "optimizer.name": {"optimizer": value},
            "memory.precision": {"precision": value},
        }.get(key, {"adapter": replace(job.adapter, kind=value)})
        yield f"{key}={value}", fix, cluster, replace(job, **changes)
