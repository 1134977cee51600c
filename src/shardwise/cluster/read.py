"""A cluster from what people type: `4x8xh100:nic=50GB/s`, a file, or `this`. No torch."""

from __future__ import annotations

from shardwise.cluster.spec import ClusterSpec, known_cluster


def read_cluster(text: str) -> ClusterSpec:
    nodes, per_node, kind = text.split("x", 2)
    return known_cluster(kind, int(nodes), int(per_node))
