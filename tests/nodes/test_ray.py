"""The driver of `shardwise launch ray` on a real Ray of two nodes."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from nodes import Command, Node, environment, finish, until
from training import check_same_losses, plan_file, steps_of

PORT, DASHBOARD = 6379, 8265
OWN = Path(sys.prefix) / "ray" / "bin"
"""Where `make cluster-tools` installs it."""
QUICK = {"RAY_health_check_period_ms": 1000, "RAY_health_check_failure_threshold": 4}
"""How soon a node is taken for lost."""


def ray_variables() -> dict[str, object]:
    """Returns the environment of Ray's processes."""
    found = shutil.which("ray", path=f"{OWN}:{environment()['PATH']}")
    if found is None:
        pytest.skip("needs ray: make cluster-tools, or pip install 'ray[default]'")
    path = f"{Path(found).parent}:{environment()['PATH']}"
    return {"PATH": path, "RAY_USAGE_STATS_ENABLED": 0, "RAY_DEDUP_LOGS": 0, **QUICK}


def start_ray(node: Node, head: Node, variables: dict[str, object]) -> Command:
    """Starts Ray on a node; the head has the dashboard, which takes jobs."""
    own = [f"--node-ip-address={node.address}", "--num-cpus=2", "--object-store-memory=100000000", "--block"]
    at = [f"--address={head.address}:{PORT}"]
    if node is head:
        at = ["--head", f"--port={PORT}", f"--dashboard-host={head.address}", f"--dashboard-port={DASHBOARD}"]
    daemon = node.start("ray", "start", *at, *own, **variables)
    daemon.is_daemon = True
    return daemon


def test_a_job_on_ray_goes_on_after_a_node_is_lost(nodes, one_process):
    a, b = nodes(2)
    variables = ray_variables()
    plan_file(a.files / "tiny.toml", "2x1xcpu", "checkpoint.every=20")
    daemons = [start_ray(a, a, variables)]
    until(lambda: a.listens_on(PORT), "Ray's head listens", daemons, 60)
    daemons.append(start_ray(b, a, variables))
    until(lambda: a.listens_on(DASHBOARD), "Ray takes jobs", daemons, 90)
    words = ["shardwise", "launch", "ray", "tiny.toml", "--address", f"http://{a.address}:{DASHBOARD}", "--submit"]
    job = a.start(*words, "--follow", **variables)
    until(lambda: steps_of(a) > 25, "a checkpoint", [job], 120)
    b.kill_all()
    until(lambda: "restart 1 of" in job.output, "the driver notices", [job], 90)
    start_ray(b, a, variables)
    assert finish([job], 150) == [0]
    check_same_losses(a, one_process)
