"""Runs a job on a Ray cluster: the scripts of `shardwise launch ray`, which `ray job submit` starts, call `main`.

One actor per node holds the node's GPUs and starts the one process of the node; Ray moves no tensors. A node that is
lost takes the attempt with it: another one begins on the nodes that are there, and goes on from the newest checkpoint.
Ray's own ports are as open as its cluster is; the job's secret goes through them once per attempt.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardwise.errors import Exit, UserError
from shardwise.launch.head_address import is_loopback
from shardwise.terminal import say, say_error

PLACED_S = 600.0  # how long nodes may take to become free
SOON_S = 5.0  # after which a line says what is waited for
ENDED_S = 600.0  # how long nodes may take to save after they were told to end


class Node:
    """The actor of one node: it starts the node's process and waits for it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

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


def about_node() -> Callable[[], dict[str, Any]]:
    """Returns the function by which a node says what must be the same on all, and where it is. It travels as it stands,
    because it has no name in this module: a node without this package can say so."""

    def about() -> dict[str, Any]:
        import importlib
        import socket
        import sys

        import ray

        try:
            importlib.import_module("shardwise.launch.schedulers.ray_driver")
            ours = importlib.import_module("shardwise").__version__
        except Exception as error:
            ours = f"that cannot be loaded ({type(error).__name__}: {error})"
        with socket.create_server(("", 0)) as free:
            port = free.getsockname()[1]
        same = {"shardwise": ours, "Python": ".".join(map(str, sys.version_info[:2])), "Ray": ray.__version__}
        return {"same": same, "address": ray.util.get_node_ip_address(), "port": port, "host": socket.gethostname()}

    return about


def _is_of_ray(name: str) -> bool:
    return name.endswith("VISIBLE_DEVICES") or name == "RAY_JOB_ID"


def main(job: dict[str, Any]) -> int:
    """Runs a job, again after nodes were lost, and returns its exit code."""
    import ray

    ray.init(log_to_driver=True)
    signal.signal(signal.SIGTERM, _interrupted)  # `ray job stop`
    lost = (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError)
    for attempt in range(job["restarts"] + 1):
        try:
            code = _attempt(ray, job)
        except lost as error:
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
        _wait_for_nodes(ray, group, job["nodes"], bundle)

        def placed(remote: Any) -> list[Any]:
            """Starts a task or an actor on each node."""
            needs = {"num_cpus": job["cpus"], "num_gpus": job["gpus"]}
            at = [PlacementGroupSchedulingStrategy(group, number) for number in range(job["nodes"])]
            return [remote.options(**needs, scheduling_strategy=place).remote() for place in at]

        about = ray.get(placed(ray.remote(max_retries=0)(about_node())))
        check_same(about)
        nodes = placed(ray.remote(max_restarts=0, max_concurrency=2)(Node))
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


def _wait_for_nodes(ray: Any, group: Any, count: int, bundle: dict[str, int]) -> None:
    """Waits until Ray has placed the job, and says what it lacks where that takes time."""
    python = ".".join(map(str, sys.version_info[:3]))
    for seconds in (SOON_S, PLACED_S):
        try:
            ray.get(group.ready(), timeout=seconds)
            return
        except ray.exceptions.GetTimeoutError:
            alive = [str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]]
        if seconds == SOON_S:
            say_error(f"waiting  for {count} free nodes with {bundle}; Ray has {len(alive)}: {', '.join(alive)}")
            say_error(
                f"         `ray start` refuses nodes of another Ray than {ray.__version__} or Python than {python}"
            )
    raise UserError(
        f"{count} nodes with {bundle} are not free",
        why=f"Ray could not place them within {PLACED_S / 60:.0f} minutes; it has {', '.join(alive)}",
        fix=f"start more nodes with `ray start`, of Ray {ray.__version__} and Python {python}, or wait for other jobs",
        code=Exit.HARDWARE,
    )


def check_same(about: list[dict[str, Any]]) -> None:
    """Refuses nodes of different versions, and names the first that is unlike node 0."""
    for node in about:
        if "cannot be loaded" in node["same"]["shardwise"]:
            raise UserError(
                f"{node['host']} has a shardwise {node['same']['shardwise']}",
                why="an actor of the job on each node starts its process from there",
                fix="install it there as on the other nodes, and start Ray from that environment",
            )
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
