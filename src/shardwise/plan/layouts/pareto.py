"""Layouts of which none is better in everything: step time, memory, GPUs, cost per token. No torch."""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.plan.layouts.candidate import Candidate, rank_of


def measures(candidate: Candidate) -> tuple[float, int, int, float]:
    """Returns the seconds of a step, bytes, GPUs, and GPU-seconds, which are what tokens cost at one price per GPU."""
    plan, prediction = candidate.plan, candidate.prediction
    return prediction.step_s, prediction.memory_bytes, plan.world, prediction.step_s * plan.world


def pareto(candidates: Iterable[Candidate]) -> list[Candidate]:
    """Returns the candidates that no other one beats in everything, fastest first; of equal ones the plainest."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=rank_of):
        mine = measures(candidate)
        if not any(all(a <= b for a, b in zip(measures(other), mine, strict=True)) for other in found):
            found.append(candidate)
    return found
