"""Decides which layers each stage of a pipeline owns. A pipeline is as fast as its slowest stage, so that one decides.

The embedding belongs to the first stage and the head to the last, so equal numbers of layers are seldom equal work.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate, pairwise

from shardwise.spec.model import ModelSpec

_SAME = 1 + 1e-9  # sums in another order differ in their last digits


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Returns layers per stage, as equal as whole layers allow; the first stages get one more."""
    assert 1 <= num_stages <= num_layers, (num_stages, num_layers)
    share, more = divmod(num_layers, num_stages)
    return tuple(share + (stage < more) for stage in range(num_stages))


def balanced_split(layer_seconds: Sequence[float], first: float, last: float, num_stages: int) -> tuple[int, ...]:
    """Returns layers per stage so that the slowest stage is as fast as possible; of those splits the most even one.

    `first` is added to the first stage (embedding), `last` to the last (head). Exact:
      1. the smallest possible maximum: of the costs that a stage can have, the least within which all layers fit
      2. within that maximum the smallest sum of squares, by dynamic programming over the few bounds that are left: the
         sum is fixed, so this is the most even split
      3. walked from the front; of equal choices the one that gives more layers to the earlier stage
    """
    num_layers = len(layer_seconds)
    assert 1 <= num_stages <= num_layers, (num_stages, num_layers)
    before = [0.0, *accumulate(layer_seconds)]
    if num_stages == 1:
        return (num_layers,)

    def cost(stage: int, begin: int, end: int) -> float:
        extra = (first if stage == 0 else 0.0) + (last if stage == num_stages - 1 else 0.0)
        return before[end] - before[begin] + extra

    def furthest(stage: int, begin: int, limit: float) -> int:
        """Returns the last layer boundary that this stage can reach; `begin` if it cannot take one layer."""
        end = min(num_layers, bisect_right(before, limit - (first if stage == 0 else 0.0) + before[begin]))
        while end > begin and cost(stage, begin, end) > limit:  # sums are rounded
            end -= 1
        return end

    def costs_between(low: float, high: float) -> list[float]:
        """Returns the costs of stages, ascending. Stage 1 stands for all that are neither first nor last."""
        found = set()
        for stage in {0, 1, num_stages - 1}:
            for begin in range(num_layers) if stage else (0,):
                least = num_layers if stage == num_stages - 1 else bisect_left(before, before[begin] + low - first)
                for end in range(max(begin + 1, least), num_layers + 1):
                    if (paid := cost(stage, begin, end)) > high:
                        break
                    found.add(paid)
        return sorted(paid for paid in found if paid >= low)

    def begins(limit: float) -> list[range] | None:
        """Returns where each stage may begin, and where the last one ends; None if there is no way to stay within the
        limit."""
        latest, earliest = [0], [num_layers]
        for stage in range(num_stages - 1):
            end = min(furthest(stage, latest[-1], limit), num_layers - (num_stages - 1 - stage))
            if end == latest[-1]:
                return None
            latest.append(end)
        for stage in reversed(range(1, num_stages)):
            begin = earliest[-1]
            while begin > stage and cost(stage, begin - 1, earliest[-1]) <= limit:
                begin -= 1
            if begin == earliest[-1]:
                return None
            earliest.append(begin)
        ranges = [range(low, high + 1) for low, high in zip([*earliest, 0][::-1], [*latest, num_layers], strict=True)]
        return ranges if all(ranges) and cost(0, 0, ranges[1].start) <= limit else None

    # No maximum is below the mean, and few are far above it.
    mean, largest = (before[-1] + first + last) / num_stages, max(layer_seconds) + max(first, last)
    costs: list[float] = []
    for most in (mean + largest, math.inf):
        costs = costs_between(mean / _SAME, most)
        if costs and begins(costs[-1] * _SAME) is not None:
            break
    limit = costs[bisect_left(costs, True, key=lambda most: begins(most * _SAME) is not None)] * _SAME
    bounds = begins(limit)
    assert bounds is not None, (limit, num_stages)

    def choices(stage: int, begin: int) -> list[tuple[int, float]]:
        ends = range(max(begin + 1, bounds[stage + 1].start), bounds[stage + 1].stop)
        if stage == num_stages - 1:
            ends = range(num_layers, num_layers + 1)
        return [(end, paid) for end in ends if (paid := cost(stage, begin, end)) <= limit]

    spread: list[dict[int, float]] = [{} for _ in range(num_stages)] + [{num_layers: 0.0}]
    for stage in reversed(range(num_stages)):
        for begin in bounds[stage]:
            rest = spread[stage + 1]
            spread[stage][begin] = min(
                (paid * paid + rest.get(end, math.inf) for end, paid in choices(stage, begin)), default=math.inf
            )
    path = [0]
    for stage in range(num_stages):
        best, rest = spread[stage][path[-1]] * _SAME, spread[stage + 1]
        path.append(max(e for e, paid in choices(stage, path[-1]) if paid * paid + rest.get(e, math.inf) <= best))
    return tuple(end - begin for begin, end in pairwise(path))


@lru_cache(64)
def estimated_costs(spec: ModelSpec, seq_len: int) -> tuple[tuple[float, ...], float, float]:
    """Returns the training FLOPs per token of each layer, of the embedding (a lookup: none) and of the head with its
    norm.

    Together they are `spec.flops_per_token`. A run measures seconds instead, once it can.
    """
    norms = (4 if spec.post_norms else 2) * spec.num_norm_parameters
    per_key = 6 * spec.num_heads * (spec.head_dim + spec.value_dim)
    layers = tuple(
        6.0 * (spec.num_attention_parameters + norms + spec.num_feedforward_parameters(layer, active_only=True))
        + per_key * spec.attention_context(layer, seq_len)
        for layer in spec.layers
    )
    return layers, 0.0, 6.0 * (spec.num_norm_parameters + spec.vocab * spec.hidden)


@lru_cache(256)
def tensor_slice(spec: ModelSpec, tp: int) -> ModelSpec:
    """Returns the largest slice that one of `tp` ranks holds, as a model of its own: whole heads, some channels, some
    of the vocabulary. Norms, routers, learned positions and the down-projections of latent attention are not cut."""
    if tp == 1:
        return spec
    cut = {"vocab", *spec.attention.cut_sizes}.union(*(layer.feedforward.cut_sizes for layer in spec.layers))
    return replace(spec, head_dim=spec.head_dim, **{name: -(-getattr(spec, name) // tp) for name in cut})
