"""Do not distribute: what the planner says when fewer devices, an adapter or no cluster at all is the better answer. No
torch.

Each piece of advice is decided from predictions of this very job, never from a rule of thumb. What is assumed beyond
them (the seconds that a job needs to start) is said.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType

from shardwise.config.units import format_bytes, format_seconds
from shardwise.plan.answer.question import Question
from shardwise.plan.layouts.search import Candidate, SearchResult, explore
from shardwise.plan.prediction.figures import step_text, whole_training
from shardwise.spec.schema import AdapterConfig
from shardwise.terminal import counted

START_UP_SECONDS = 60.0
PER_NODE_SECONDS = 2.0
"""Until the first step: Python and torch on every rank, process groups, weights, the first batches. Assumed, not
measured on the cluster."""

WORTH = 1.02
"""Fewer devices must lose no more than this to be the better answer."""


@dataclass(frozen=True)
class Advice:
    """What may be better than any row, with its reason."""

    what: str
    why: str
    candidate: Candidate | None = None  # what to run instead, on this cluster


def advice_for(question: Question, result: SearchResult) -> list[Advice]:
    found = [fewer_devices(question, result), one_card_with_lora(question, result), too_short(question, result)]
    return [one for one in found if one is not None]


def fewer_devices(question: Question, result: SearchResult) -> Advice | None:
    """Returns the advice to use the fewest devices that are as fast as any number, within WORTH; None if that is all of
    them."""
    cluster, by_gpus = question.cluster, result.by_gpus
    if not by_gpus:
        return None
    fastest = min(found.prediction.step_s for found in by_gpus.values())
    num, best = min((n, found) for n, found in by_gpus.items() if found.prediction.step_s <= WORTH * fastest)
    most = max(by_gpus)
    if num >= cluster.world or num >= most:
        return None
    all_of_them = by_gpus[most]
    slower = all_of_them.prediction.step_s / best.prediction.step_s - 1
    compared = f"{step_text(best.prediction.step_s)} per step; {most} take {step_text(all_of_them.prediction.step_s)}"
    compared += f" ({slower:+.0%})" if abs(slower) >= 0.005 else " too"
    if cluster.nodes > 1 and (num <= cluster.per_node or num % cluster.per_node == 0):
        link, nodes = cluster.tiers[-1], cluster.nodes_of(num)
        gain = "are faster" if slower > 0 else "are as fast, within 2 %,"
        return Advice(
            f"use {nodes} of your {cluster.nodes} nodes: fewer nodes {gain} on this link",
            f"{best.plan.layout} on {num} GPUs: {compared}; "
            f"the {link.name} has {link.bandwidth / 1e9:.3g} GB/s per card",
            best,
        )
    here = (
        f"of your {cluster.world} GPUs"
        if cluster.device.kind == "cuda"
        else f"process{'es' * (num > 1)} for your {cluster.world} cores"
    )
    return Advice(f"use {num} {here}", f"{best.plan.layout}: {compared}; {_why_no_gain(all_of_them)}", best)


def _why_no_gain(candidate: Candidate) -> str:
    """Returns in words the largest part of a step, besides computing, that more devices do not shorten."""
    parts = candidate.prediction.step
    waits = {name: seconds for name, seconds in parts.items() if name != "compute" and seconds > 0}
    if not waits:
        return "the batch has no work for more"
    name = max(waits, key=lambda part: waits[part])
    return f"{waits[name] / candidate.prediction.step_s:.0%} of their step is {name}"


def one_card_with_lora(question: Question, result: SearchResult) -> Advice | None:
    """Returns the advice to fine-tune with LoRA on one card, where that fits and training all weights there does
    not."""
    job, winner = question.job, result.candidates[0]
    starts_from_weights = question.loaded.config.model.path is not None
    is_short = job.tokens is not None and job.tokens < question.spec.num_parameters
    if job.adapter.kind != "none" or not (starts_from_weights or is_short) or not question.spec.is_ours:
        return None
    if winner.plan.world == 1 and winner.plan.offload == "none":
        return None
    alone = {f"parallel.{axis}": 1 for axis in ("dp", "tp", "pp", "cp", "ep")} | {"memory.offload": "none"}
    kept = {key: value for key, value in job.constraints.items() if not key.startswith("parallel.")}
    single = replace(job, constraints=MappingProxyType(kept | alone))
    if explore(question.spec, question.cluster, single, 1, detail=False).candidates:
        return None
    targets = ("q", "k", "v", "o") if question.spec.is_moe else ("all-linear",)  # no adapters on experts
    adapted = replace(single, adapter=AdapterConfig(kind="lora", targets=targets))
    found = explore(question.spec, question.cluster, adapted, 1, detail=False).candidates
    if not found:
        return None
    best = found[0]
    return Advice(
        "if you fine-tune, LoRA on one card is enough (adapter.kind=lora)",
        f"{format_bytes(best.prediction.memory_bytes)} on 1 GPU and {step_text(best.prediction.step_s)} per step; "
        f"all weights take {winner.plan.world} GPUs and {step_text(winner.prediction.step_s)}",
    )


def too_short(question: Question, result: SearchResult) -> Advice | None:
    """Returns the advice against a training that takes less time than its own start; None if it takes longer."""
    best = result.candidates[0]
    whole = whole_training(question.job, best.plan, best.prediction, question.cluster)
    if whole is None:
        return None
    nodes = question.cluster.nodes_of(best.plan.world)
    start = START_UP_SECONDS + PER_NODE_SECONDS * nodes
    if whole.seconds >= start:
        return None
    fewest = min(result.by_gpus, default=best.plan.world)
    one = result.by_gpus.get(fewest, best)
    alone = whole_training(question.job, one.plan, one.prediction, question.cluster)
    assert alone is not None
    other = (
        f"; {counted(fewest, 'GPU')} would train {format_seconds(alone.seconds)}" if fewest < best.plan.world else ""
    )
    return Advice(
        "this training is shorter than its own start-up",
        f"it trains {format_seconds(whole.seconds)} and starts for about {format_seconds(start)} "
        f"(assumed: {START_UP_SECONDS:.0f} s and {PER_NODE_SECONDS:.0f} s per node){other}",
    )
