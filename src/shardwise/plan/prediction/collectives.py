"""Seconds of messages between ranks: all-reduce, all-gather, reduce-scatter, all-to-all, point to point. No torch.

A group is `size` ranks, `stride` apart. Ranks of one domain talk over the fast link; between domains each has its
network card, so a group with g members in every domain has g cards to itself. A ring takes a step per rank and is as
fast as its slowest hop; a tree takes few steps and is chosen where messages are small. Checked against NCCL's times on
2 to 8 A100 (calib_nccl_allreduce_vtrain.csv) in tests/plan/test_collectives.py. Invariant: a group of one sends nothing
and takes no time. Read next: step_time.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from shardwise.plan.prediction.calibration import measured
from shardwise.spec.cluster import ClusterSpec, Link

TREE = measured("tree_bytes")


class Path(NamedTuple):
    """The links that a group's collectives go over."""

    rate: float  # bytes per second and rank, into and out of it
    alpha: float  # seconds per step
    half: float  # bytes of a message that are lost to starting it
    domains: int  # fast-link domains that the group touches
    inside: int  # members per domain
    summing: float  # of an all-reduce over a gather: switches that add
    link: Link  # the slowest that it goes over


SERVER = 16
"""Cards that the largest servers have. A domain of more is a rack, of which jobs take a power of two: 64 of 72."""


def usual_span(tier: Link) -> int:
    """Returns the number of ranks of one domain that jobs fill."""
    return tier.span if tier.span <= SERVER else 1 << (tier.span.bit_length() - 1)


def _together(tier: Link, block: int) -> int:
    """Returns how many of `block` neighbouring ranks surely share a domain."""
    return max(math.gcd(tier.span, block), math.gcd(usual_span(tier), block))


class Network:
    """The links of a cluster. `world`: ranks in use, where they are fewer than a domain or do not fill whole ones."""

    def __init__(self, cluster: ClusterSpec, world: int = 0):
        self.world = world
        self.tiers: tuple[Link, ...] = cluster.tiers
        self.path = lru_cache(maxsize=4096)(self._path)

    def _path(self, size: int, stride: int) -> Path:
        first, block = self.tiers[0], size * stride
        if self._joins(first, block):
            return Path(first.rate(size), first.alpha, first.half, 1, size, first.summing, first)
        # Groups that do not line up with domains lie across their borders, and only a part of each is together.
        members = min(size, max(1, _together(first, block) // stride))
        rate, alpha, half = first.rate(members) if members > 1 else math.inf, first.alpha, first.half
        below = first
        for tier in self.tiers[1:]:
            cards = min(size, max(1, _together(below, block) // stride))
            rate = min(rate, cards * tier.rate())
            alpha, half = max(alpha, tier.alpha), max(half, tier.half)
            if self._joins(tier, block):
                break
            below = tier
        return Path(rate, alpha, half, -(-size // members), members, 1.0, tier)

    def _joins(self, tier: Link, block: int) -> bool:
        """Whether every group that takes `block` neighbouring ranks lies within one domain of this tier."""
        return tier is self.tiers[-1] or _together(tier, block) == block or 0 < self.world <= tier.span

    def all_gather(self, size: float, ranks: int, stride: int = 1) -> float:
        """`size`: bytes of the whole result. A reduce-scatter is the same the other way round."""
        if ranks == 1 or not size:
            return 0.0
        path = self.path(ranks, stride)
        return (ranks - 1) * path.alpha + ((ranks - 1) / ranks * size + path.half) / path.rate

    reduce_scatter = all_gather

    def all_reduce(self, size: float, ranks: int, stride: int = 1) -> float:
        if ranks == 1 or not size:
            return 0.0
        path = self.path(ranks, stride)
        moved = (2 * (ranks - 1) / ranks * size / path.summing + path.half) / path.rate
        ring = 2 * (ranks - 1) * path.alpha + moved
        inside = 2 * (path.inside - 1) * self.tiers[0].alpha
        tree = 2 * math.ceil(math.log2(max(2, path.domains))) * path.alpha + inside + TREE * moved
        return min(ring, tree)

    def all_to_all(self, size: float, ranks: int, stride: int = 1) -> float:
        """`size`: bytes that each rank has for all of them together, its own share included."""
        if ranks == 1 or not size:
            return 0.0
        path, first = self.path(ranks, stride), self.tiers[0]
        inside = max(0, path.inside - 1) / ranks * size / first.rate(path.inside)
        if path.domains == 1:
            return path.alpha + inside + path.half / path.rate
        # Every rank has its own card for what leaves the domain.
        outside = (ranks - path.inside) / ranks * size / (path.rate / path.inside)
        return path.domains * path.alpha + max(inside, outside) + path.half / path.rate

    def send(self, size: float, distance: int) -> float:
        """Returns the seconds of a send of `size` bytes to a rank at this distance."""
        if not size:
            return 0.0
        tier = next((tier for tier in self.tiers if distance < tier.span), self.tiers[-1])
        return tier.alpha + (size + tier.half) / tier.rate(2)


_NETWORKS: dict[tuple[int, int], tuple[ClusterSpec, Network]] = {}


def odd_world(cluster: ClusterSpec, world: int) -> int:
    """The number of ranks, where it is no whole number of fast-link domains: then it matters how groups lie in them.
    Else 0."""
    span = cluster.tiers[0].span
    return world if world < span or world % span else 0


def network_of(cluster: ClusterSpec, world: int) -> Network:
    """One network for all layouts, because it remembers paths. `world`: as `odd_world` has it."""
    found = _NETWORKS.get((id(cluster), world))
    if found is None:
        if len(_NETWORKS) > 64:
            _NETWORKS.clear()
        found = _NETWORKS[id(cluster), world] = (cluster, Network(cluster, world))
    return found[1]
