"""Reads where a process stands that an actor of Ray started, one per node."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardwise.launch.place import NodePlace
from shardwise.launch.schedulers import ssh


def detect(environ: Mapping[str, str]) -> NodePlace | None:
    """Returns the place that the driver of `shardwise launch ray` gave to this node's actor."""
    place = ssh.detect(environ, "ray") if "RAY_JOB_ID" in environ else None
    return replace(place, job=environ["RAY_JOB_ID"]) if place else None
