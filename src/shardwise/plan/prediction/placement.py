"""Which links a layout's collectives use: the one answer for prices, tables and the words of a plan. No torch.

Ranks are numbered with tp innermost, then context, shards, replicas, and the pipeline outermost (parallel/mesh.py), so
neighbours share the fastest links. Where a group lies is what its prices are made from (collectives.py): a group whose
length does not divide a domain straddles a border somewhere, and then goes over the slower link, however short it is.
Invariant: an axis is described by the slowest link that any of its groups goes over; some of its traffic may stay on a
faster one.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.plan.prediction.collectives import network_of, odd_world
from shardwise.spec.cluster import ClusterSpec, Link
from shardwise.spec.plan import Plan

PARTS_OF_AXES = {
    "tensor-parallel": "tp",
    "context-parallel": "cp",
    "expert-parallel": "ep",
    "data-parallel": "dp",
    "pipeline": "pp",
}
"""Parts of a step that are communication, and the axis that they are counted for."""


@dataclass(frozen=True)
class PlacedAxis:
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
    axes = {
        "tp": (plan.tp, 1),
        "cp": (plan.cp, plan.tp),
        "ep": (plan.ep, 1),
        "dp": (plan.dp, plan.cp * plan.tp),
        "pp": (plan.pp, plan.stage_world),
    }
    found = []
    for name, (ranks, stride) in axes.items():
        if ranks > 1:
            path = network.path(ranks, stride)
            found.append(PlacedAxis(name, ranks, stride, path.link, path.inside))
    return found
