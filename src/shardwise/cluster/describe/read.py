"""Reads a cluster from what people type. No torch.

    h100                        one card
    8xh100                      one machine of 8
    4x8xh100                    4 of them
    4x8xh100:nic=50GB/s,nics=4  with other numbers (changes.py lists them)
    cluster.toml                a file (toml.py), as `shardwise doctor --out` writes it
    cluster.toml:nodes=16       16 machines like the one that was measured
    this                        this machine, measured now, in ten seconds or so

Invariant: what comes back is a ClusterSpec; anything else is a UserError with the nearest name or the range that makes
sense.
"""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.cluster.describe.changes import SETTINGS, changed, kind_of, read_setting, read_settings
from shardwise.cluster.describe.table import known_cluster, known_devices
from shardwise.cluster.describe.toml import cluster_from_toml
from shardwise.errors import UserError
from shardwise.spec.cluster import ClusterSpec

SHORTHAND = re.compile(r"(?:(-?\d+)\s*[x*]\s*)?(?:(-?\d+)\s*[x*]\s*)?([a-z][\w.-]*|\d{4})", re.IGNORECASE)
EXAMPLE = "for example `8xh100`, `4x8xh100:nic=50GB/s`, `cluster.toml` or `this`"


def read_cluster(text: str) -> ClusterSpec:
    text = text.strip()
    base, colon, settings = (text, "", "") if Path(text).is_file() else text.partition(":")
    given = read_settings(settings, base) if colon else {}
    return changed(_base(base), given)


def _base(text: str) -> ClusterSpec:
    if text == "this":
        from shardwise.cluster.describe.here import measured_here

        return measured_here()
    if text.endswith(".toml") or Path(text).is_file():
        return cluster_from_toml(text)
    if text and Path(text).is_dir():
        raise UserError(f"{text} is a directory", why="a cluster is a TOML file, or words", fix=EXAMPLE)
    match = SHORTHAND.fullmatch(text)
    if match is None:
        raise UserError(
            f"`{text}` is no cluster", why="it is read as NODES x DEVICES x KIND, or as a file", fix=EXAMPLE
        )
    first, second, name = match.groups()
    nodes = read_setting("nodes", first if second else "1", SETTINGS["nodes"], None)
    kind, per_node = kind_of(name), int(second or first or "1")
    most = known_devices()[kind]["domain"]
    if most < per_node <= SETTINGS["nodes"].high:
        why = f"its fast link joins {most}; as typed, {per_node} of them would share one machine"
        fix = f"`{-(-nodes * per_node // most)}x{most}x{kind}`"
        raise UserError(f"no machine has {per_node} {kind}", why=why, fix=fix)
    return known_cluster(kind, nodes, read_setting("per_node", str(per_node), SETTINGS["per_node"], None))
