"""What the search has to say about a run: other degrees where the usual ones do not fit, or on several GPUs are slower.
No torch.

What the user has set is a constraint; only what is open may change. On CPUs the usual layout stays while it fits: ranks
there share one memory, and a prediction before anything was measured is no reason to leave it. Invariant: a layout that
is proposed here was predicted to fit, and is planned again from its settings, by the rules of every other one. Read
next: resolve.py, search.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from shardwise.config.keys import DEFAULT, Origins
from shardwise.config.units import format_bytes
from shardwise.errors import UserError
from shardwise.plan.layouts.search import fastest
from shardwise.plan.prediction.memory import predict_elsewhere
from shardwise.plan.prediction.predict import predict
from shardwise.plan.resolve.degrees import MAX_DEFAULT_CPU_RANKS
from shardwise.plan.resolve.hardware import attention_here
from shardwise.plan.resolve.refusal import Asked
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import job_of
from shardwise.spec.optimizers import OPTIMIZERS
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction

WORTH = 1.05
"""A layout must be predicted so much faster than the usual one, or it is not worth leaving it."""

HOST_SHARE = 0.8  # of the machine's memory, for what GPUs keep there

OPEN = ("dp", "zero", "replicate", "tp", "sequence", "cp", "cp_kind", "pp", "schedule", "virtual_stages", "ep")
"""Keys of [parallel] that the search may fill."""

BELONGS = (("tp", "sequence"), ("cp", "cp_kind"), ("pp", "schedule"), ("pp", "virtual_stages"))


class MemorySaving(NamedTuple):
    recompute: str
    offload: str

    def __str__(self) -> str:
        return " ".join(f"{name}={value}" for name, value in zip(self._fields, self, strict=True) if value != "none")


@dataclass(frozen=True)
class Better:
    settings: Mapping[str, Any]  # config key -> value, for what was open
    plan: Plan
    short: str  # why, for each key


def possible_savings(asked: Asked) -> list[MemorySaving]:
    """What the config leaves open, the cheapest first. On a CPU offloaded state stays in the same memory."""
    memory, optimizer = asked.config.memory, asked.config.optimizer.name
    recompute = ("none", "selective", "full") if memory.recompute == "auto" else (memory.recompute,)
    offload: tuple[str, ...] = ({"nvme": "optimizer"}.get(memory.offload, memory.offload),)
    if memory.offload == "auto":
        can_leave = (
            asked.device == "cuda" and not OPTIMIZERS[optimizer].is_low_bit and asked.config.adapter.kind == "none"
        )
        offload = ("none", "optimizer", "all") if can_leave else ("none",)
    return [MemorySaving(again, away) for away in offload for again in recompute]


def fits_on_host(asked: Asked, plan: Plan) -> bool:
    """Whether the machine has room for what its GPUs keep in CPU memory."""
    is_asked = asked.config.memory.offload != "auto" or plan.offload == "none"
    if plan.device == "cpu" or (is_asked and not plan.activation_offload):
        return True
    away = predict_elsewhere(asked.spec, plan, asked.config.optimizer.name, asked.config.adapter).get("host", 0)
    return away * plan.world <= HOST_SHARE * asked.machine.memory_bytes


def better_layout(
    asked: Asked, usual: Plan, limit: int, fits: bool, origins: Origins, plan_of: Callable[[Asked], Plan]
) -> Better | None:
    """Returns what the search proposes instead of the usual layout; None where that stays, or nothing is open."""
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
    fixed |= {f"speed.{key}": value for key, value in asdict(asked.config.speed).items() if value != "auto"}
    job = job_of(asked.config, usual)
    job = replace(job, constraints=MappingProxyType(fixed), attention=attention_here(asked))
    found = fastest(asked.spec, cluster, job, asked.nproc)
    if found is None or not fits_on_host(asked, found.plan):
        return None
    settings = {key: value for key, value in _settings(found.plan, asked).items() if key in open_keys}
    try:
        plan = plan_of(asked.changed(settings))
    except UserError:  # two rules that the search does not know
        return None
    before, after = (predict(asked.spec, cluster, job, each) for each in (usual, plan))
    if after.memory_bytes > limit or (fits and before.step_s <= WORTH * after.step_s):
        return None
    why, short = _why(plan, after, usual, before, limit, fits, cluster.world)
    return Better(settings, replace(plan, reason=why), short)


def _open_keys(asked: Asked, origins: Origins) -> set[str]:
    config = asked.config
    found = {f"parallel.{key}" for key in OPEN if getattr(config.parallel, key) == "auto"}
    for axis, key in BELONGS:
        if f"parallel.{axis}" not in found:  # asked for, and with it what usually goes with it
            found.discard(f"parallel.{key}")
        elif origins.get(f"parallel.{key}", DEFAULT) == DEFAULT:
            found.add(f"parallel.{key}")
    found |= {f"memory.{key}" for key in ("recompute", "offload") if getattr(config.memory, key) == "auto"}
    if config.train.micro_batch == "auto":
        found.add("train.micro_batch")
    is_decided = not any(f"parallel.{key}" in found for key in ("dp", "zero", "tp", "cp", "pp", "ep"))
    return set() if is_decided else found


def _settings(plan: Plan, asked: Asked) -> dict[str, Any]:
    """Returns a plan as config keys and values."""
    found: dict[str, Any] = {f"parallel.{key}": getattr(plan, key) for key in OPEN}
    found |= {"memory.recompute": plan.recompute, "memory.offload": plan.offload}
    if plan.pp == 1:  # what a pipeline would have, nobody has decided
        del found["parallel.schedule"], found["parallel.virtual_stages"]
    if plan.cp == 1:
        del found["parallel.cp_kind"]
    if not plan.zero:
        del found["parallel.replicate"]
    if asked.config.train.micro_batch != "auto":
        found["train.micro_batch"] = plan.micro_batch
    return found


def _cluster(asked: Asked, usual: Plan, limit: int) -> ClusterSpec:
    """Returns a cluster of as many devices as may be used, with the memory that a rank may use."""
    found = asked.cluster
    world = asked.nproc or len(asked.machine.gpus) or usual.world
    if asked.device == "cpu" and not asked.nproc and asked.config.memory.limit != "auto":  # more ranks have more memory
        world = max(world, min(asked.machine.cores, MAX_DEFAULT_CPU_RANKS))
    tier = replace(found.tiers[-1], span=max(world, found.tiers[-1].span))
    return replace(found, per_node=world, device=replace(found.device, memory=limit), tiers=(tier,))


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
