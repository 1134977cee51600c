"""Reads the variables that `shardwise launch ssh` sets on every machine, which a person may set by hand as well."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.launch.head_address import given_heads
from shardwise.launch.place import NodePlace, port_of_job, position, secret_of_job

FIX = "SHARDWISE_HEAD=ADDRESS on every node, an address of node 0 that the others reach"


def detect(environ: Mapping[str, str], scheduler: str = "ssh") -> NodePlace | None:
    """Returns the place of a node whose number is in SHARDWISE_NODE."""
    if "SHARDWISE_NODE" not in environ:
        return None
    index, count = position(environ, "SHARDWISE_NODE", "SHARDWISE_NODES")
    heads = given_heads(environ, count, FIX)
    return NodePlace(
        scheduler=scheduler,
        job=heads[0],
        index=index,
        count=count,
        heads=heads,
        port=port_of_job(environ, heads[0]),
        secret_file=secret_of_job(environ),
    )
