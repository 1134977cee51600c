"""The driver of `shardwise launch ray` on a real Ray of two nodes."""

from __future__ import annotations

import shutil
import subprocess
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


ASK = """
import base64, sys, ray
print(ray.cloudpickle.loads(base64.b64decode(sys.argv[1]))()["same"]["shardwise"])
"""
PACK = """
import base64, ray
from shardwise.launch.schedulers.ray_driver import about_node
print(base64.b64encode(ray.cloudpickle.dumps(about_node())).decode())
"""


def test_a_node_says_also_without_shardwise_that_it_has_none(tmp_path: Path):
    """The function travels to it as Ray sends it; a package of this name that is another one lies there."""
    variables = {name: str(value) for name, value in (environment() | ray_variables()).items()}
    packed = subprocess.run(["python", "-c", PACK], env=variables, capture_output=True, text=True, check=True).stdout
    (tmp_path / "shardwise").mkdir()
    (tmp_path / "shardwise" / "__init__.py").touch()
    for path, ours in ((str(tmp_path), "that cannot be loaded (ModuleNotFoundError"), (variables["PYTHONPATH"], "0.")):
        words = ["python", "-c", ASK, packed.split()[-1]]
        asked = subprocess.run(words, env=variables | {"PYTHONPATH": path}, capture_output=True, text=True)
        said = asked.stdout.splitlines() or [""]  # Ray itself may have said something before
        assert said[-1].startswith(ours), asked.stdout + asked.stderr


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
    version = next(OWN.parent.glob("lib/python*/site-packages/ray/_version.py"), None)
    if version is not None:  # of this test's own: then b has another one
        b.run("sh", "-c", f"sed 's/version = .*/version = \"1.0\"/' {version} >/run/v; mount --bind /run/v {version}")
        refused = start_ray(b, a, variables)
    until(lambda: a.listens_on(DASHBOARD), "Ray takes jobs", daemons, 90)
    words = ["shardwise", "launch", "ray", "tiny.toml", "--address", f"http://{a.address}:{DASHBOARD}", "--submit"]
    job = a.start(*words, "--follow", **variables)
    if version is not None:
        until(lambda: "`ray start` refuses nodes of another Ray" in job.output, "the driver says so", [job], 60)
        assert finish([refused]) != [0] and "Version mismatch" in refused.output
        assert f"Ray has 1: {a.address}" in job.output
        b.run("umount", version)
    start_ray(b, a, variables)
    until(lambda: steps_of(a) > 25, "a checkpoint", [job], 120)
    b.kill_all()
    until(lambda: "restart 1 of" in job.output, "the driver notices", [job], 90)
    start_ray(b, a, variables)
    assert finish([job], 150) == [0]
    check_same_losses(a, one_process)
