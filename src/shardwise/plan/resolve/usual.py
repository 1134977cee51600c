"""The usual layout of a run: what is set, whole replicas, and no more ZeRO, recomputation or offload than it takes to
fit. Before torch is imported.

`plan_of` walks over layouts of the planner's space (layouts/space.py) with the degrees of degrees.py, the plainest
first, and takes the first that fits. `completed` makes the plan of a run from any layout of that space, the search's
too, and refuses what cannot run. Read next: resolve.py, which weighs the usual layout against the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from types import MappingProxyType
from typing import Any

from shardwise.cluster.describe.capabilities import attention_here, check_cuda_only, choose_precision, why_precision
from shardwise.config.check_plan import check_plan
from shardwise.config.keys import Origins
from shardwise.errors import UserError
from shardwise.plan.layouts.parts import Pace, Saving, States
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction.memory import predict_elsewhere
from shardwise.plan.resolve.degrees import Degrees, choose_degrees, global_batch_of
from shardwise.plan.resolve.fit import needed_memory, rank_memory_limit
from shardwise.plan.resolve.refusal import Asked
from shardwise.plan.resolve.speed import with_speed
from shardwise.spec.cluster import HEADROOM
from shardwise.spec.job import Job
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

DEFAULT_STEPS = 340

LAYOUT = (
    *("dp", "zero", "replicate", "tp", "sequence", "cp", "cp_kind", "pp", "schedule", "virtual_stages", "split", "ep"),
    *("recompute", "offload", "activation_offload"),
)
"""What a layout of the space decides in a run's plan."""

USUAL_RECOMPUTE = ("none", "selective", "full")
"""Recomputation that comes without a search."""


def plan_of(asked: Asked, num_sequences: int, origins: Origins = MappingProxyType({})) -> Plan:
    """Returns the usual plan of a job: the smallest ZeRO stage that fits. What costs time comes after that: computing
    again, then states in CPU memory. Where nothing fits, it is the plan that needs the least memory."""
    degrees = choose_degrees(asked, origins)
    precision, constraints = choose_precision(asked.config, asked.machine, origins), constraints_of(asked.config)
    space = Space(asked.spec, asked.cluster, job_of_run(asked, precision, constraints), constraints)
    reason = degrees.reason + why_precision(asked.config, asked.machine)
    pace = Pace(1, asked.config.parallel.schedule, degrees.virtual_stages)
    stages, savings = _stages(space, degrees), _savings(space)
    plan: Plan | None = None
    for saving, states in product(savings, stages):
        layout = space.plan(degrees.grid, pace, states, saving)
        try:
            new, fits = completed(asked, layout, reason, num_sequences, origins)
        except UserError:  # what is set does not go with what was chosen here
            if plan is None:
                raise
            continue
        if saving.offload != savings[0].offload and not fits_on_host(asked, new):
            continue
        plan = new
        if fits:
            chosen = f"; zero={plan.zero} is the smallest stage that fits" if plan.zero and len(stages) > 1 else ""
            saved = f"; {_said(plan)} because it does not fit without" if saving != savings[0] else ""
            return replace(plan, reason=plan.reason + chosen + saved)
    assert plan is not None, degrees
    if len(stages) == len(savings) == 1:
        return plan
    words = [f"zero={plan.zero}"] * (len(stages) > 1) + [_said(plan)] * (len(savings) > 1)
    return replace(plan, reason=f"{plan.reason}; {' '.join(words)} needs the least memory")


def job_of_run(asked: Asked, precision: str, constraints: Mapping[str, Any]) -> Job:
    """Returns the job that the planner lays out."""
    train, optimizer, adapter = asked.config.train, asked.config.optimizer.name, asked.config.adapter
    batch, attention = global_batch_of(train), attention_here(asked.config, asked.machine)
    return Job(train.seq_len, batch, None, precision, optimizer, adapter, constraints, attention=attention)


def constraints_of(config: Config) -> dict[str, Any]:
    """Returns the keys that a config sets and a layout has: key and value."""
    sections = {"parallel": config.parallel, "memory": config.memory, "comm": config.comm}
    found = {f"{name}.{key}": value for name, section in sections.items() for key, value in vars(section).items()}
    found["train.micro_batch"] = config.train.micro_batch
    not_of_a_layout = ("parallel.layout", "memory.precision", "memory.limit")
    return {key: value for key, value in found.items() if value not in ("auto", None) and key not in not_of_a_layout}


def completed(
    asked: Asked, layout: Plan, reason: str, num_sequences: int, origins: Origins = MappingProxyType({})
) -> tuple[Plan, bool]:
    """Returns the plan of a run with this layout of the space, and whether it fits. It has the config's own values
    where a layout says nothing, the length of the training, the tricks of [speed] that the layout bears, and the
    largest micro-batch that fits. The run measures the micro-batch again."""
    config, machine = asked.config, asked.machine
    threads = max(1, machine.cores // layout.world)
    goes_to = "nvme" if config.memory.offload == "nvme" else config.memory.offload_to
    plan = Plan.of(
        config,
        device=asked.device,
        precision=layout.precision,
        seq_len=layout.seq_len,
        global_batch=layout.global_batch,
        micro_batch=1,
        num_steps=_num_steps(config, layout.global_batch, num_sequences),
        threads_per_rank=threads if asked.device == "cpu" else min(4, threads),
        reason=reason,
        offload_to=goes_to,
        offload_dir=(config.memory.offload_dir or config.run.dir) if goes_to == "nvme" else "",
        **{name: getattr(layout, name) for name in LAYOUT},
    )
    check_plan(config, plan, asked.spec, origins)
    check_cuda_only(config, asked.spec, machine, origins)
    plan = with_speed(
        plan, config.speed, asked.spec, attention_here(config, machine), skips_steps=config.run.on_nan == "skip"
    )
    limit, size = HEADROOM * rank_memory_limit(config, machine, plan), config.train.micro_batch
    for micro_batch in micro_batch_sizes(plan) if size == "auto" else [int(size)]:
        plan = replace(plan, micro_batch=micro_batch)
        if needed_memory(asked.spec, plan, config) <= limit:
            return plan, True
    return plan, False


def fits_on_host(asked: Asked, plan: Plan) -> bool:
    """Returns whether the machine has room for what its GPUs keep in CPU memory. What was asked for is tried."""
    is_asked = asked.config.memory.offload != "auto" or plan.offload == "none"
    if plan.device == "cpu" or (is_asked and not plan.activation_offload):
        return True
    away = predict_elsewhere(asked.spec, plan, asked.config.optimizer.name, asked.config.adapter).get("host", 0)
    return away <= asked.cluster.host_room(plan.world)


def micro_batch_sizes(plan: Plan) -> list[int]:
    """Returns the sizes that `micro_batch = "auto"` chooses from, in sequences, largest first: even parts of a rank's
    rows. A pipeline idles for pp - 1 of every M + pp - 1 slots, so it gets M >= 4 pp micro-batches (GPipe, arXiv
    1811.06965, section 2.3) where rows allow."""
    rows = plan.rows_per_rank
    most = rows if plan.pp == 1 else max(1, rows // (4 * plan.pp))
    return [size for size in range(most, 0, -1) if rows % size == 0]


def _stages(space: Space, degrees: Degrees) -> list[States]:
    """Returns every ZeRO stage that is possible, with as few replicas as is allowed."""
    found: dict[int, States] = {}
    for states in sorted(space.states(degrees.grid)):
        found.setdefault(states.zero, states)
    return list(found.values())


def _savings(space: Space) -> list[Saving]:
    """Returns the recomputation and offload that come without a search, the cheapest first."""
    is_asked = {key: f"memory.{key}" in space.fixed for key in ("recompute", "activation_offload")}
    return [
        saving
        for saving in space.savings
        if (is_asked["recompute"] or saving.recompute in USUAL_RECOMPUTE)
        and (is_asked["activation_offload"] or not saving.activation_offload)
    ]


def _said(plan: Plan) -> str:
    words = {"recompute": plan.recompute, "offload": plan.offload}
    return " ".join(f"{name}={value}" for name, value in words.items() if value != "none")


def _num_steps(config: Config, global_batch: int, num_sequences: int) -> int:
    train = config.train
    if train.tokens:
        return math.ceil(train.tokens / (global_batch * train.seq_len))
    if train.epochs:
        return max(1, math.ceil(train.epochs * num_sequences / global_batch))
    return train.steps or DEFAULT_STEPS
