"""Which layers each stage of a pipeline owns. A pipeline is as fast as its slowest stage, so that one decides.

The embedding belongs to the first stage and the head to the last, so equal numbers of layers are seldom equal work.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from shardwise.model.spec import ModelSpec

_SAME = 1 + 1e-9  # sums in another order differ in their last digits


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """As equal as whole layers allow; the first stages get one more."""
    assert 1 <= num_stages <= num_layers, (num_stages, num_layers)
    share, more = divmod(num_layers, num_stages)
    return tuple(share + (stage < more) for stage in range(num_stages))


def balanced_split(layer_seconds: Sequence[float], first: float, last: float, num_stages: int) -> tuple[int, ...]:
    """Layers per stage so that the slowest stage is as fast as possible; of those splits the most even one.

    `first` is added to the first stage (embedding), `last` to the last (head). Exact, in num_stages x layers^2 steps:
      1. the smallest possible maximum, by dynamic programming from the last stage to the first
      2. within that maximum the smallest sum of squares, the same way: the sum is fixed, so this is the most even split
      3. walked from the front; of equal choices the one that gives more layers to the earlier stage
    """
    num_layers = len(layer_seconds)
    assert 1 <= num_stages <= num_layers, (num_stages, num_layers)
    before = [0.0, *accumulate(layer_seconds)]

    def choices(stage: int, begin: int, limit: float) -> list[tuple[int, float]]:
        """Where a stage that begins here may end, and its cost. Every stage has a layer; the last one ends the model."""
        left = num_stages - 1 - stage
        ends = range(begin + 1, num_layers - left + 1) if left else (num_layers,)
        extra = (first if stage == 0 else 0.0) + (last if left == 0 else 0.0)
        costs = ((end, before[end] - before[begin] + extra) for end in ends)
        return [(end, cost) for end, cost in costs if cost <= limit]

    def best_rests(join: Callable[[float, float], float], limit: float) -> list[list[float]]:
        """[stage][begin]: the best value of this stage and all after it; one row more for the end of the model."""
        best = [[math.inf] * (num_layers + 1) for _ in range(num_stages)] + [[0.0] * (num_layers + 1)]
        for stage in reversed(range(num_stages)):
            for begin in range(stage, num_layers):
                joined = (join(cost, best[stage + 1][end]) for end, cost in choices(stage, begin, limit))
                best[stage][begin] = min(joined, default=math.inf)
        return best

    limit = best_rests(max, math.inf)[0][0] * _SAME
    squares = best_rests(lambda cost, rest: cost * cost + rest, limit)
    bounds = [0]
    for stage in range(num_stages):
        best = squares[stage][bounds[-1]] * _SAME
        good = (end for end, cost in choices(stage, bounds[-1], limit) if cost * cost + squares[stage + 1][end] <= best)
        bounds.append(max(good))
    return tuple(end - begin for begin, end in pairwise(bounds))


def estimated_costs(spec: ModelSpec, seq_len: int) -> tuple[tuple[float, ...], float, float]:
    """Training FLOPs per token of each layer, of the embedding (a lookup: none) and of the head with its norm.

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
