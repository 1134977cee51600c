"""What would make a run fit: the changes of layouts/remedies.py, tried against the prediction, the cheapest first.

Every one of them goes the way that a typed one goes: the rules of the config, the planner, predicted memory against the
limit. What the schema does not offer yet is no candidate. So a change that is printed works when it is typed. No torch
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations

from shardwise.cluster.describe.machine import Machine
from shardwise.config.check import check_config
from shardwise.config.keys import all_keys
from shardwise.config.units import format_bytes
from shardwise.errors import Exit, UserError
from shardwise.plan.layouts.remedies import Remedy, layout_changes, more_ranks, other_trainings
from shardwise.plan.prediction.memory import predict_memory
from shardwise.plan.prediction.rank_share import rank_shares
from shardwise.plan.prediction.step_time import step_seconds
from shardwise.plan.resolve.refusal import Asked, Fix, Refusal, typed
from shardwise.spec.job import job_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.schema import Config

MAX_WAYS = 3

PlanOf = Callable[[Asked], Plan]
"""The planner, without its look at the memory limit."""


def rank_memory_limit(config: Config, machine: Machine, plan: Plan) -> int:
    """Returns the bytes that one rank may use: the user's limit, a GPU's memory, or an equal share of the machine's."""
    if config.memory.limit != "auto":
        return int(config.memory.limit)
    if plan.device == "cuda":
        return min(gpu.memory_bytes for gpu in machine.gpus)
    return machine.memory_bytes // plan.world


def needed_memory(spec: ModelSpec, plan: Plan, config: Config) -> int:
    """Returns the predicted bytes of the fullest rank."""
    return sum(predict_memory(spec, plan, config.optimizer.name, config.adapter).values())


def does_not_fit(asked: Asked, plan: Plan, limit: int, plan_of: PlanOf) -> UserError:
    """Returns the verdict before the first step: what would be held and by what, how far over, what would fit."""
    spec, parts = asked.spec, predict_memory(asked.spec, plan, asked.config.optimizer.name, asked.config.adapter)
    total = sum(parts.values())
    held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items() if size)
    return UserError(
        f"{spec.name} does not fit: {format_bytes(total)} per rank of {format_bytes(limit)}, "
        f"{format_bytes(total - limit)} over",
        why=f"{plan.layout} with micro-batch {plan.micro_batch} holds {held}; {largest_part(spec, plan)}",
        fix=" or ".join(f"{way.what} ({way.cost})" for way in ways_to_fit(asked, plan, plan_of))
        or _elsewhere(asked, plan),
        code=Exit.OUT_OF_MEMORY,
    )


def _elsewhere(asked: Asked, plan: Plan) -> str:
    """Returns in words what to do where nothing on this machine helps. Ranks on CPUs share its memory, so more of them
    need more of it."""
    if plan.device == "cpu" and asked.config.memory.limit == "auto":
        here = format_bytes(asked.machine.memory_bytes)
        model = asked.config.model.path or asked.config.model.preset
        plans = f"`shardwise plan {model} --cluster 8xh100` plans for GPUs"
        return f"a smaller model.preset or train.seq_len: all ranks share {here} here; {plans}"
    ranks = "more ranks to split it over (parallel.tp, parallel.pp, parallel.cp)"
    return f"a smaller model.preset or train.seq_len, or {ranks}"


def largest_part(spec: ModelSpec, plan: Plan) -> str:
    """Returns in words the part of the model with most parameters, on the rank that has it."""
    parts: dict[str, int] = {}
    for share in rank_shares(spec, plan):
        for layer, size in zip(share.layers, share.layer_parameters, strict=True):
            parts[f"layer {layer.index}"] = size
        parts |= {"the embedding": share.embedding, "the head": share.head}
    name = max(parts, key=lambda part: parts[part])
    return f"the largest part is {name} with {parts[name]:,} parameters"


def ways_to_fit(
    asked: Asked, plan: Plan, plan_of: PlanOf, *, scale: float = 1.0, without: tuple[str, ...] = ()
) -> list[Remedy]:
    """Returns at most three changes, cheapest first: one, or two together where one is not enough. `scale`: how much
    more than predicted the job really took. `without`: keys that must stay."""
    cluster = asked.cluster

    def seconds(config: Config, of: Plan) -> float:
        return sum(step_seconds(asked.spec, cluster, job_of(config, of), of).values())

    before = seconds(asked.config, plan)

    def tried(fix: Fix) -> Remedy | None:
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
        return Remedy(fix, typed(fix), memory, seconds(other.config, new), before)

    singles = [fix for fix in _candidates(asked, plan) if _is_offered(fix) and not set(fix) & set(without)]
    found = _first_of_each_kind(way for fix in singles if (way := tried(fix)))
    if len(found) < MAX_WAYS:
        enough = {frozenset(way.change) for way in found}
        pairs = [a | b for a, b in combinations(singles, 2) if _can_go_together(a, b, enough)]
        found += _first_of_each_kind(way for fix in pairs if (way := tried(fix)))
    if len(found) < MAX_WAYS:  # other values of the same keys
        found += [way for fix in singles if fix not in [w.change for w in found] and (way := tried(fix))]
    return sorted(found, key=lambda way: (not way.same_losses, len(way.change) > 2, way.slower))[:MAX_WAYS]


def _candidates(asked: Asked, plan: Plan) -> Iterator[Fix]:
    """Yields single changes. Of several values for one key only the first that fits is reported."""
    config = asked.config
    yield from layout_changes(asked, plan)
    yield from more_ranks(asked, plan, _devices(asked))
    has_weights = config.model.path is not None
    yield from other_trainings(plan.precision, config.optimizer.name, config.adapter.kind, has_weights)


def _devices(asked: Asked) -> int:
    return len(asked.machine.gpus) or asked.machine.cores


def _is_offered(fix: Fix) -> bool:
    """Returns whether the schema takes these values today."""
    known = all_keys()
    for name, value in fix.items():
        key = known.get(name)
        if key is not None and (key.later or (key.available is not None and value not in key.available)):
            return False
    return True


def _can_go_together(a: Fix, b: Fix, enough: set[frozenset[str]]) -> bool:
    return not set(a) & set(b) and not any(keys <= set(a | b) for keys in enough)


def _first_of_each_kind(ways: Iterator[Remedy]) -> list[Remedy]:
    """Returns the first remedy for each set of keys."""
    found: dict[frozenset[str], Remedy] = {}
    for way in ways:
        found.setdefault(frozenset(way.change), way)
    return list(found.values())
