"""Which links a layout's collectives use, and their seconds: all-reduce, all-gather, reduce-scatter, all-to-all, send
and receive. No torch.

A group is `size` ranks, `stride` apart. Ranks of one domain talk over the fast link; between domains each has its
network card, so a group with g members in every domain has g cards to itself. A ring takes a step per rank and is as
fast as its slowest hop; a tree takes few steps and is chosen where little is sent. Checked against NCCL's times on 2 to
8 A100 (vTrain's measurements) in tests/plan/test_collectives.py.

Ranks are numbered with tp innermost, then context, shards, replicas, and the pipeline outermost (parallel/mesh.py), so
neighbours share the fastest links. A group whose length does not divide a domain straddles a border somewhere, and then
goes over the slower link, however short it is. Invariants: a group of one sends nothing and takes no time; an axis is
described by the slowest link that any of its groups goes over, the one that its price is made from. Read next:
step_time.py.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from shardwise.plan.prediction.calibration import measured
from shardwise.spec.cluster import ClusterSpec, Link
from shardwise.spec.plan import Plan

TREE = measured("tree_bytes")


class Path(NamedTuple):
    """The links that a group's collectives go over."""

    rate: float  # bytes per second and rank, into and out of it
    alpha: float  # seconds per step
    half: float  # bytes that could be sent in the time that starting takes
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
        """Returns the links between `size` ranks that are `stride` apart."""
        first, block = self.tiers[0], size * stride
        if self._joins(first, block):
            return Path(first.rate(size), first.alpha, first.half, 1, size, first.summing, first)
        # Groups that do not line up with domains lie across their borders, and only a part of each is together.
        members = min(size, max(1, _together(first, block) // stride))
        rate, alpha, half = first.rate(members) if members > 1 else math.inf, first.alpha, first.half
        below = first
        for tier in self.tiers[1:]:
            cards = min(size, max(1, _together(below, block) // stride))
            rate, alpha, half = min(rate, cards * tier.rate()), max(alpha, tier.alpha), max(half, tier.half)
            if self._joins(tier, block):
                break
            below = tier
        return Path(rate, alpha, half, -(-size // members), members, 1.0, tier)

    def _joins(self, tier: Link, block: int) -> bool:
        """Returns whether every group that takes `block` neighbouring ranks lies within one domain of this tier."""
        return tier is self.tiers[-1] or _together(tier, block) == block or 0 < self.world <= tier.span

    def all_gather(self, size: float, ranks: int, stride: int = 1) -> float:
        """Returns the seconds of gathering `size` bytes in all. A reduce-scatter is the same the other way round."""
        if ranks == 1 or not size:
            return 0.0
        path = self.path(ranks, stride)
        return (ranks - 1) * path.alpha + ((ranks - 1) / ranks * size + path.half) / path.rate

    reduce_scatter = all_gather

    def all_reduce(self, size: float, ranks: int, stride: int = 1) -> float:
        """Returns the seconds of summing `size` bytes that every rank has, as a ring or as a tree."""
        if ranks == 1 or not size:
            return 0.0
        path = self.path(ranks, stride)
        moved = (2 * (ranks - 1) / ranks * size / path.summing + path.half) / path.rate
        ring = 2 * (ranks - 1) * path.alpha + moved
        inside = 2 * (path.inside - 1) * self.tiers[0].alpha
        tree = 2 * math.ceil(math.log2(max(2, path.domains))) * path.alpha + inside + TREE * moved
        return min(ring, tree)

    def all_to_all(self, size: float, ranks: int, stride: int = 1) -> float:
        """Returns the seconds of an exchange in which each rank has `size` bytes for all together, itself included."""
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


def odd_world(cluster: ClusterSpec, world: int) -> int:
    """Returns the number of ranks, where it is no whole number of fast-link domains: then it matters how groups lie in
    them. Else 0."""
    span = cluster.tiers[0].span
    return world if world < span or world % span else 0


@lru_cache(64)
def network_of(cluster: ClusterSpec, world: int) -> Network:
    """Returns one network for all layouts, because it remembers paths. `world`: the result of `odd_world`."""
    return Network(cluster, world)


# Axes of a layout ---------------------------------------------------------------------------------------------------

PARTS_OF_AXES = {
    "tensor-parallel": "tp", "context-parallel": "cp", "expert-parallel": "ep", "data-parallel": "dp", "pipeline": "pp",
}  # fmt: skip
"""Parts of a step that are communication, and the axis that they are counted for."""


class PlacedAxis(NamedTuple):
    """One axis of a layout and where its groups lie."""

    name: str
    ranks: int
    stride: int  # from one rank of a group to the next
    link: Link  # the slowest that any group goes over
    together: int  # ranks of a group that surely share one domain of the fastest link

    def __str__(self) -> str:
        return f"{self.name}={self.ranks} over {self.link.name}, {self.together} per domain"


def placement(cluster: ClusterSpec, plan: Plan) -> list[PlacedAxis]:
    """Returns every axis that has more than one rank, in the order tp, cp, ep, dp, pp."""
    network = network_of(cluster, odd_world(cluster, plan.world))
    axes = [("tp", plan.tp, 1), ("cp", plan.cp, plan.tp), ("ep", plan.ep, 1), ("dp", plan.dp, plan.cp * plan.tp)]
    found = []
    for name, ranks, stride in (*axes, ("pp", plan.pp, plan.stage_world)):
        if ranks > 1:
            path = network.path(ranks, stride)
            found.append(PlacedAxis(name, ranks, stride, path.link, path.inside))
    return found
