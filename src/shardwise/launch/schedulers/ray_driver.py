"""Runs a job on a Ray cluster: the scripts of `shardwise launch ray`, which `ray job submit` starts, call `main`.

One actor per node holds the node's GPUs and starts the one process of the node; Ray moves no tensors. A node that is
lost takes the attempt with it: another one begins on the nodes that are there, and goes on from the newest checkpoint.
Ray's own ports are as open as its cluster is; the job's secret goes through them once per attempt.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise import __version__
from shardwise.errors import Exit, UserError
from shardwise.launch.head_address import is_loopback
from shardwise.terminal import say, say_error

PLACED_S = 600.0  # how long nodes may take to become free
ENDED_S = 600.0  # how long nodes may take to save after they were told to end


class Node:
    """The actor of one node: it starts the node's process and waits for it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def about(self) -> dict[str, Any]:
        """Returns what must be the same on all nodes, and where this one is."""
        import ray

        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        python = ".".join(map(str, sys.version_info[:3]))
        same = {"shardwise": __version__, "Python": python, "Ray": ray.__version__}
        return {"same": same, "address": ray.util.get_node_ip_address(), "port": port, "host": socket.gethostname()}

    def work(self, command: list[str], variables: dict[str, str], secret: str, environment: list[str]) -> int:
        """Runs the node's process and returns its exit code. The environment has what is named, what Ray says about
        devices, and where this node stands."""
        kept = {name: value for name, value in os.environ.items() if name in environment or _is_of_ray(name)}
        with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
            file = Path(folder) / "secret"
            with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
                out.write(secret)
            own = variables | {"SHARDWISE_SECRET_FILE": str(file)}
            self.process = subprocess.Popen(command, env=kept | own, stdin=subprocess.DEVNULL)
            return self.process.wait()

    def end(self) -> None:
        """Tells the process to save and end."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)


def _is_of_ray(name: str) -> bool:
    return name.endswith("VISIBLE_DEVICES") or name == "RAY_JOB_ID"


def main(job: dict[str, Any]) -> int:
    """Runs a job, again after nodes were lost, and returns its exit code."""
    import ray

    ray.init(log_to_driver=True)
    signal.signal(signal.SIGTERM, _interrupted)  # `ray job stop`
    for attempt in range(job["restarts"] + 1):
        try:
            code = _attempt(ray, job)
        except ray.exceptions.RayActorError as error:
            say_error(f"lost     a node: {next(iter(str(error).splitlines()), '')}")
            code = int(Exit.HARDWARE)
        except UserError as error:
            say_error(str(error))
            return int(error.code)
        except KeyboardInterrupt:
            return int(Exit.STOPPED)
        if code != Exit.HARDWARE or attempt == job["restarts"]:
            return code
        say_error(f"again    restart {attempt + 1} of {job['restarts']}, from the newest checkpoint")
        time.sleep(5.0)
    return int(Exit.HARDWARE)


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _attempt(ray: Any, job: dict[str, Any]) -> int:
    """Places one actor on each node, starts the nodes' processes and returns the exit code that they agree on."""
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    bundle = {"CPU": job["cpus"], **({"GPU": job["gpus"]} if job["gpus"] else {})}
    group = placement_group([bundle] * job["nodes"], strategy="STRICT_SPREAD")
    try:
        try:
            ray.get(group.ready(), timeout=PLACED_S)
        except ray.exceptions.GetTimeoutError:
            raise UserError(
                f"{job['nodes']} nodes with {bundle} are not free",
                why=f"Ray could not place them within {PLACED_S / 60:.0f} minutes; it has {ray.cluster_resources()}",
                fix="start more nodes with `ray start`, or wait for other jobs",
                code=Exit.HARDWARE,
            ) from None
        remote = ray.remote(max_restarts=0, max_concurrency=2)(Node)
        nodes = [
            remote.options(
                num_cpus=job["cpus"],
                num_gpus=job["gpus"],
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number),
            ).remote()
            for number in range(job["nodes"])
        ]
        about = ray.get([node.about.remote() for node in nodes])
        check_same(about)
        head, port, secret = about[0]["address"], about[0]["port"], secrets.token_hex(16)
        if len(nodes) > 1 and is_loopback(head):
            raise UserError(
                f"Ray says that node 0 is at {head}",
                why="that is another machine on each node",
                fix="start Ray with `ray start --node-ip-address ADDRESS`",
            )
        at = {"SHARDWISE_NODES": str(len(nodes)), "SHARDWISE_HEAD": head, "SHARDWISE_PORT": str(port)}
        running = [
            node.work.remote(job["command"], at | {"SHARDWISE_NODE": str(number)}, secret, job["environment"])
            for number, node in enumerate(nodes)
        ]
        try:
            return _agreed(ray.get(running))
        except KeyboardInterrupt:
            for node in nodes:
                node.end.remote()
            return _agreed(ray.get(running, timeout=ENDED_S))
    finally:
        remove_placement_group(group)


def check_same(about: list[dict[str, Any]]) -> None:
    """Refuses nodes of different versions, and names the first that is unlike node 0."""
    first = about[0]
    for other in about[1:]:
        for name, version in first["same"].items():
            if other["same"][name] != version:
                raise UserError(
                    f"{other['host']} has {name} {other['same'][name]}, and {first['host']} has {version}",
                    why="all nodes of a job run the same program",
                    fix=f"install {name} {version} there, or start Ray from one environment on all nodes",
                )


def _agreed(codes: list[int]) -> int:
    say(f"ended    exit codes of the nodes: {', '.join(map(str, codes))}")
    return codes[0] or next((code for code in codes if code), 0)
