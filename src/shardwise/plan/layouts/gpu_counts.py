"""How many GPUs of a cluster a search tries, where nobody has fixed their number. No torch.

Invariant: what is tried for a question about the number itself (`finer_gpu_counts`) on a larger cluster of the same
nodes contains what is tried on a smaller one, so its answer needs no more GPUs.
"""

from __future__ import annotations

import math
from functools import cache

from shardwise.spec.cluster import ClusterSpec

SMALL_WORLD = 16
"""Up to so many GPUs every number of them is tried, beyond it powers of two and what nodes divide into."""


def gpu_counts(cluster: ClusterSpec, asked: int) -> list[int]:
    """Returns the numbers of GPUs that a ranking tries, descending. `asked`: ranks that fixed degrees make together."""
    world, nodes, per_node = cluster.world, cluster.nodes, cluster.per_node
    if world <= SMALL_WORLD:
        return list(range(world, 0, -1))
    counts = {world, *_powers(1, world), *(per_node * n for n in divisors(nodes)), *_powers(per_node, world)}
    if nodes <= SMALL_WORLD:
        counts |= {per_node * n for n in range(1, nodes + 1)}
    counts |= {world // asked * asked, *_powers(asked, world)} - {0}
    return sorted(counts, reverse=True)


def finer_gpu_counts(cluster: ClusterSpec, asked: int) -> list[int]:
    """Returns the numbers of GPUs that are tried where their number is the question, ascending: every one up to
    SMALL_WORLD, every number of nodes up to twice as many, and beyond that steps of at most one in SMALL_WORLD; the
    same of replicas whose degrees are fixed."""
    world = cluster.world
    few, nodes = range(1, min(world, SMALL_WORLD) + 1), _steps(cluster.per_node, world)
    return sorted({*gpu_counts(cluster, asked), *few, *nodes, *(_steps(asked, world) if asked > 1 else ())})


@cache
def divisors(number: int) -> tuple[int, ...]:
    """Returns all divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def _steps(unit: int, most: int) -> list[int]:
    """Returns multiples of `unit` up to `most`, in steps of one unit at first and of at most one in SMALL_WORLD
    later."""
    found, step = [unit], unit
    while (following := found[-1] + step) <= most:
        found.append(following)
        if following >= 2 * SMALL_WORLD * step:
            step *= 2
    return found if unit <= most else []


def _powers(first: int, most: int) -> list[int]:
    """Returns first, 2 first, 4 first, ... up to `most`."""
    return [first << n for n in range((most // first).bit_length())] if first <= most else []
