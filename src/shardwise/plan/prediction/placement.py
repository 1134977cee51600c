"""Which links a layout's messages use: for every axis the tier of the cluster that joins its ranks. No torch.

Ranks are numbered with tp innermost, then context, shards, replicas, and the pipeline outermost (plan.py), so neighbours share the fastest
links. Invariant: an axis is told with the tier that its whole group needs; part of its messages may stay on a faster one.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.plan import Plan


@dataclass(frozen=True)
class Placed:
    axis: str
    ranks: int
    stride: int  # from one of its ranks to the next
    tier: str  # of the link that joins all of them
    together: int  # of them that share one domain of the fastest link

    def __str__(self) -> str:
        return f"{self.axis}={self.ranks} over {self.tier}, {self.together} per domain"


PARTS = {
    "tp": "tensor-parallel",
    "cp": "context-parallel",
    "ep": "expert-parallel",
    "shard": "data-parallel",
    "replicate": "data-parallel",
    "pp": "pipeline",
}
"""Axis -> the part of a step that its messages are counted in."""


def placement(cluster: ClusterSpec, plan: Plan) -> list[Placed]:
    """Of every axis that has more than one rank, from the innermost to the outermost."""
    inner = plan.cp * plan.tp
    axes = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, 1),
        "shard": (plan.shard, inner),
        "replicate": (plan.replicate, inner * plan.shard),
        "pp": (plan.pp, plan.stage_world),
    }
    return [placed(cluster, axis, *where) for axis, where in axes.items() if where[0] > 1]


def placed(cluster: ClusterSpec, axis: str, ranks: int, stride: int) -> Placed:
    reach = (ranks - 1) * stride + 1
    together = min(ranks, max(1, cluster.tiers[0].span // stride))
    return Placed(axis, ranks, stride, cluster.tier(min(reach, cluster.world)).name, together)
