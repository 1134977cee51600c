"""What would make a job fit: config changes that were tried against the prediction, the cheapest first.

Every candidate goes the way that a typed one goes: the rules of the config, the planner, predicted memory against the limit. What the
schema does not offer yet is no candidate. So a change that is printed works when it is typed. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations

from shardwise.cluster.describe.machine import Machine
from shardwise.config.check import check_config
from shardwise.config.keys import all_keys
from shardwise.config.units import format_bytes
from shardwise.errors import Exit, UserError
from shardwise.plan.prediction.memory import predict_memory
from shardwise.plan.prediction.rank_share import rank_shares
from shardwise.plan.prediction.step_time import step_seconds
from shardwise.plan.resolve.refusal import Asked, Fix, Refusal, typed
from shardwise.spec.job import job_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

MAX_WAYS = 3
CHANGES_NUMBERS = ("optimizer.name", "memory.precision", "adapter.kind")
"""Keys after which a run does not compute the same losses any more: offered after all others."""

PlanOf = Callable[[Asked], Plan]
"""The planner, without its look at the memory limit."""


@dataclass(frozen=True)
class Way:
    """A change after which the job fits."""

    fix: Fix
    memory: int  # bytes per rank
    slower: float  # step time over that of the job as it was asked for

    @property
    def same_losses(self) -> bool:
        return not any(key in CHANGES_NUMBERS for key in self.fix)

    def cost(self) -> str:
        return f"{format_bytes(self.memory)}, {100 * (self.slower - 1):+.0f} % step time"


def rank_memory_limit(config: Config, machine: Machine, plan: Plan) -> int:
    """Bytes one rank may use: the user's limit, a GPU's memory, or an equal share of the machine's."""
    if config.memory.limit != "auto":
        return int(config.memory.limit)
    if plan.device == "cuda":
        return min(gpu.memory_bytes for gpu in machine.gpus)
    return machine.memory_bytes // plan.world


def needed_memory(spec: ModelSpec, plan: Plan, config: Config) -> int:
    return sum(predict_memory(spec, plan, config.optimizer.name, config.adapter).values())


def does_not_fit(asked: Asked, plan: Plan, limit: int, plan_of: PlanOf) -> UserError:
    """The verdict before the first step: what would be held and by what, how far over, what would fit."""
    spec, parts = asked.spec, predict_memory(asked.spec, plan, asked.config.optimizer.name, asked.config.adapter)
    total = sum(parts.values())
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return UserError(
        f"{spec.name} does not fit: {format_bytes(total)} per rank of {format_bytes(limit)}, {format_bytes(total - limit)} over",
        why=f"{plan.layout} with micro-batch {plan.micro_batch} holds {held}; {largest_part(spec, plan)}",
        fix=" or ".join(f"{typed(way.fix)} ({way.cost()})" for way in ways_to_fit(asked, plan, plan_of))
        or _elsewhere(asked, plan),
        code=Exit.OUT_OF_MEMORY,
    )


def _elsewhere(asked: Asked, plan: Plan) -> str:
    """Nothing on this machine helps. Ranks on CPUs share its memory, so more of them need more of it."""
    if plan.device == "cpu" and asked.config.memory.limit == "auto":
        here = format_bytes(asked.machine.memory_bytes)
        model = asked.config.model.path or asked.config.model.preset
        return f"a smaller model.preset or train.seq_len: all ranks share {here} here; `shardwise plan {model} --cluster 8xh100` plans for GPUs"
    return "a smaller model.preset or train.seq_len, or more ranks to split it over (parallel.tp, parallel.pp, parallel.cp)"


def largest_part(spec: ModelSpec, plan: Plan) -> str:
    """The part of the model with most parameters, on the rank that has it."""
    parts: dict[str, int] = {}
    for share in rank_shares(spec, plan):
        for layer, size in zip(share.layers, share.layer_parameters, strict=True):
            parts[f"layer {layer.index}"] = size
        parts |= {"the embedding": share.embedding, "the head": share.head}
    name = max(parts, key=lambda part: parts[part])
    return f"the largest part is {name} with {parts[name]:,} parameters"


def ways_to_fit(
    asked: Asked,
    plan: Plan,
    plan_of: PlanOf,
    *,
    scale: float = 1.0,
    without: tuple[str, ...] = (),
) -> list[Way]:
    """At most three, cheapest first: one change, or two together where one is not enough. `scale`: how much more than predicted
    the job really took. `without`: keys that must stay."""
    cluster = asked.cluster

    def seconds(config: Config, of: Plan) -> float:
        return sum(step_seconds(asked.spec, cluster, job_of(config, of), of).values())

    before = seconds(asked.config, plan)

    def tried(fix: Fix) -> Way | None:
        other = asked.changed(fix)
        try:
            check_config(other.config, {})
            new = plan_of(other)
        except (Refusal, UserError):
            return None
        if new.world > max(plan.world, _devices(asked)):
            return None
        memory = int(scale * needed_memory(asked.spec, new, other.config))
        if memory > rank_memory_limit(other.config, asked.machine, new):
            return None
        return Way(fix, memory, seconds(other.config, new) / before)

    singles = [fix for fix in _candidates(asked, plan) if _is_offered(fix) and not set(fix) & set(without)]
    found = _first_of_each_kind(way for fix in singles if (way := tried(fix)))
    if len(found) < MAX_WAYS:
        enough = {frozenset(way.fix) for way in found}
        pairs = [a | b for a, b in combinations(singles, 2) if _can_go_together(a, b, enough)]
        found += _first_of_each_kind(way for fix in pairs if (way := tried(fix)))
    if len(found) < MAX_WAYS:  # other values of the same keys
        found += [way for fix in singles if fix not in [w.fix for w in found] and (way := tried(fix))]
    return sorted(found, key=lambda way: (not way.same_losses, len(way.fix) > 2, way.slower))[:MAX_WAYS]


def _candidates(asked: Asked, plan: Plan) -> Iterator[Fix]:
    """Single changes. Of several values for one key the mildest comes first, and only the first that fits is told."""
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
    yield from _more_ranks(asked, plan)
    if plan.precision == "fp32":
        yield {"memory.precision": "bf16"}
    if config.optimizer.name in ("adam", "adamw"):
        yield {"optimizer.name": "adamw8bit"}
    if config.adapter.kind == "none" and config.model.path:  # there is something to adapt
        yield from ({"adapter.kind": kind} for kind in ("lora", "qlora"))
    if config.optimizer.name != "sgd":
        yield {"optimizer.name": "sgd"}


def _more_ranks(asked: Asked, plan: Plan) -> Iterator[Fix]:
    """As many times the ranks as there are devices for."""
    times = 2
    while times * plan.world <= _devices(asked):
        started: Fix = {"--nproc": times * asked.nproc} if asked.nproc else {"parallel.dp": plan.dp}
        yield from ({f"parallel.{axis}": times * getattr(plan, axis), **started} for axis in ("tp", "cp", "pp"))
        if plan.zero or asked.config.parallel.zero == "auto":
            yield started if asked.nproc else {"parallel.dp": times * plan.dp}
        times *= 2


def _devices(asked: Asked) -> int:
    return len(asked.machine.gpus) or asked.machine.cores


def _is_offered(fix: Fix) -> bool:
    """Whether the schema takes these values today."""
    known = all_keys()
    for name, value in fix.items():
        key = known.get(name)
        if key is not None and (key.later or (key.available is not None and value not in key.available)):
            return False
    return True


def _can_go_together(a: Fix, b: Fix, enough: set[frozenset[str]]) -> bool:
    return not set(a) & set(b) and not any(keys <= set(a | b) for keys in enough)


def _first_of_each_kind(ways: Iterator[Way]) -> list[Way]:
    """One way per set of keys."""
    found: dict[frozenset[str], Way] = {}
    for way in ways:
        found.setdefault(frozenset(way.fix), way)
    return list(found.values())
