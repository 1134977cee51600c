"""From what the user asked for to a `Plan`: fills every `auto` and refuses what cannot work, before torch is imported.

Two layouts of the same space (layouts/space.py), by the same prices, are weighed: the usual one, whose parts a user
expects (usual.py), and the fastest that the search finds, as `shardwise plan` reports it. What the user has set is a
constraint for both. The usual one stays while it fits and the other is not clearly faster; on CPUs, where ranks share
one memory and a prediction before anything was measured is no reason to leave it, while it fits. What was chosen and
why goes into the config (config/filled.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwise.cluster.describe.machine import Machine
from shardwise.config.filled import fill
from shardwise.config.keys import DEFAULT, Origins, where_written
from shardwise.config.units import format_bytes
from shardwise.errors import Exit, UserError
from shardwise.interop.transformers.spec import can_mask, no_document_mask
from shardwise.plan.layouts.search import fastest
from shardwise.plan.prediction.memory import predict_elsewhere
from shardwise.plan.prediction.predict import predict
from shardwise.plan.resolve.adapter_choice import settle_adapter
from shardwise.plan.resolve.degrees import default_cpu_ranks
from shardwise.plan.resolve.fit import does_not_fit, needed_memory, rank_memory_limit
from shardwise.plan.resolve.refusal import Asked
from shardwise.plan.resolve.usual import completed, constraints_of, fits_on_host, job_of_run, plan_of
from shardwise.spec.cluster import HOST_HEADROOM, ClusterSpec
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction
from shardwise.spec.recompute import check_activation_offload
from shardwise.spec.schema import Config
from shardwise.terminal import counted

WORTH = 1.05
"""A layout must be predicted so much faster than the usual one, or it is not worth leaving it."""

OPEN = ("dp", "zero", "replicate", "tp", "sequence", "cp", "cp_kind", "pp", "schedule", "virtual_stages", "ep")
"""Keys of [parallel] that the search may fill."""

BELONGS = (("tp", "sequence"), ("cp", "cp_kind"), ("pp", "schedule"), ("pp", "virtual_stages"))
"""An axis, and a key that goes with it: whoever sets the axis has decided about the key too."""


@dataclass(frozen=True)
class Resolved:
    """A plan, and the config with the same values filled in for people to read."""

    plan: Plan
    config: Config
    chosen: Mapping[str, str]  # the keys that the planner filled -> why


@dataclass(frozen=True)
class Better:
    """A layout that the search proposes instead of the usual one."""

    plan: Plan
    decided: frozenset[str]  # config keys that were open
    short: str  # why, for each key


def resolve(
    config: Config,
    spec: ModelSpec,
    machine: Machine,
    nproc: int | None,
    num_sequences: int,
    origins: Origins = MappingProxyType({}),
    measured: ClusterSpec | None = None,
) -> Resolved:
    """Returns the plan that will run. `num_sequences`: sequences in one pass over the training data, which `epochs`
    needs. `origins`: for the errors. `measured`: this machine as somebody measured it."""
    train = config.train
    if spec.positions == "learned" and train.seq_len > spec.max_seq_len:
        raise UserError(
            f"train.seq_len = {train.seq_len} is longer than {spec.name} can read",
            why=f"its learned positions end at {spec.max_seq_len}",
            fix=f"train.seq_len={spec.max_seq_len}",
            where=where_written(origins, "train.seq_len"),
        )
    if config.data.document_mask is True and not can_mask(spec):
        raise no_document_mask(spec.name, where_written(origins, "data.document_mask"))
    config = settle_adapter(config, spec, origins)
    asked = Asked(config, spec, machine, nproc, measured)
    if config.memory.activation_offload:
        check_activation_offload(asked.device, where_written(origins, "memory.activation_offload"))
    plan = plan_of(asked, num_sequences, origins)
    limit = rank_memory_limit(config, machine, plan)
    fits = needed_memory(spec, plan, config) <= limit
    better = _better(asked, plan, limit, fits, origins, lambda layout: completed(asked, layout, "", num_sequences)[0])
    if better is not None:
        plan = better.plan
    elif not fits:
        raise does_not_fit(asked, plan, limit, lambda other: plan_of(other, num_sequences))
    if not fits_on_host(asked, plan):
        raise _no_room_on_host(asked, plan, origins)
    return Resolved(plan, *fill(config, plan, better.decided if better else (), better.short if better else ""))


def _no_room_on_host(asked: Asked, plan: Plan, origins: Origins) -> UserError:
    config = asked.config
    away = plan.world * predict_elsewhere(asked.spec, plan, config.optimizer.name, config.adapter)["host"]
    return UserError(
        f"memory.activation_offload needs {format_bytes(away)} of CPU memory, this machine has "
        f"{format_bytes(asked.machine.memory_bytes)}",
        why=f"all activations of {counted(plan.world, 'rank')} with micro-batch "
        f"{plan.micro_batch} wait there, and {HOST_HEADROOM:.0%} of it may be used",
        fix="memory.activation_offload=false memory.recompute=full"
        + (" or train.micro_batch=1" if plan.micro_batch > 1 else ""),
        where=where_written(origins, "memory.activation_offload"),
        code=Exit.OUT_OF_MEMORY,
    )


# The fastest layout against the usual one ----------------------------------------------------------------------------


def _better(
    asked: Asked, usual: Plan, limit: int, fits: bool, origins: Origins, plan_with: Callable[[Plan], Plan]
) -> Better | None:
    """Returns the layout that the search proposes instead of the usual one; None where that stays, or nothing is open.
    `plan_with`: from a layout to the plan of a run."""
    open_keys = _open_keys(asked, origins)
    is_plain = usual.zero == 0 and (usual.recompute, usual.offload) == ("none", "none")
    has_choice = asked.device == "cuda" and (len(asked.machine.gpus) > 1 or not is_plain)
    if not open_keys or not asked.spec.is_ours or (fits and not has_choice):
        return None
    if fits and is_plain and usual.world == (asked.nproc or len(asked.machine.gpus)):
        open_keys &= {"parallel.dp"}  # whole replicas on all GPUs: only fewer of them could be faster
        if asked.nproc or not open_keys:
            return None
    cluster = _cluster(asked, usual, limit)
    fixed = {key: value for key, value in _settings(usual, asked).items() if key not in open_keys}
    job = job_of_run(asked, usual.precision, fixed)
    found = fastest(asked.spec, cluster, job, asked.nproc)
    if found is None:
        return None
    try:
        plan = plan_with(found.plan)
    except UserError:  # a rule that the search does not know
        return None
    before, after = (predict(asked.spec, cluster, job, each) for each in (usual, plan))
    if after.memory_bytes > limit or (fits and before.step_s <= WORTH * after.step_s):
        return None
    why, short = _why(plan, after, usual, before, limit, fits, cluster.world)
    return Better(replace(plan, reason=why), frozenset(open_keys & set(_settings(plan, asked))), short)


def _open_keys(asked: Asked, origins: Origins) -> set[str]:
    config = asked.config
    found = {f"parallel.{key}" for key in OPEN if getattr(config.parallel, key) == "auto"}
    for axis, key in BELONGS:
        if f"parallel.{axis}" not in found:
            found.discard(f"parallel.{key}")
        elif origins.get(f"parallel.{key}", DEFAULT) == DEFAULT:
            found.add(f"parallel.{key}")
    found |= {f"memory.{key}" for key in ("recompute", "offload") if getattr(config.memory, key) == "auto"}
    if config.train.micro_batch == "auto":
        found.add("train.micro_batch")
    is_decided = not any(f"parallel.{key}" in found for key in ("dp", "zero", "tp", "cp", "pp", "ep"))
    return set() if is_decided else found


def _settings(plan: Plan, asked: Asked) -> dict[str, object]:
    """Returns the constraints that a plan meets, as config keys and values."""
    found: dict[str, object] = constraints_of(asked.config) | {f"parallel.{key}": getattr(plan, key) for key in OPEN}
    found |= {"memory.recompute": plan.recompute, "memory.offload": plan.offload}
    found |= {f"speed.{key}": value for key, value in vars(asked.config.speed).items() if value != "auto"}
    if plan.pp == 1:  # what a pipeline would have, nobody has decided
        del found["parallel.schedule"], found["parallel.virtual_stages"]
    if plan.cp == 1:
        del found["parallel.cp_kind"]
    if not plan.zero:
        del found["parallel.replicate"]
    return found


def _cluster(asked: Asked, usual: Plan, limit: int) -> ClusterSpec:
    """Returns a cluster of as many devices as may be used, with the memory that a rank may use."""
    found = asked.cluster
    world = asked.nproc or len(asked.machine.gpus) or usual.world
    if asked.device == "cpu" and not asked.nproc and asked.config.memory.limit != "auto":  # more ranks have more memory
        world = max(world, default_cpu_ranks(asked.machine))
    device, host = replace(found.device, memory=limit), asked.machine.memory_bytes // world
    nodes, last = asked.machine.nodes, found.tiers[-1]
    per_node = -(-world // nodes)
    inside = (replace(found.tiers[0], span=per_node),) if nodes > 1 else ()
    tiers = (*inside, replace(last, span=max(per_node * nodes, last.span)))
    return replace(found, nodes=nodes, per_node=per_node, device=device, tiers=tiers, host_memory=host)


def _why(
    plan: Plan, after: Prediction, usual: Plan, before: Prediction, limit: int, fits: bool, world: int
) -> tuple[str, str]:
    if not fits:
        short = f"{usual.layout} does not fit"
        return f"{short}: {format_bytes(before.memory_bytes)} of {format_bytes(limit)}", short
    gain = f"predicted to be {before.step_s / after.step_s - 1:.0%} faster than {usual.layout}"
    if plan.world < world:
        return f"{plan.world} of {world} GPUs: {gain}", f"{plan.world} of {world} GPUs are faster"
    return gain, f"faster than {usual.layout}"
