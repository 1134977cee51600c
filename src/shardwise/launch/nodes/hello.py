"""What the nodes of a job tell each other before anything starts, and whether they go together.

All ranks execute one plan with one code: another version of this package, of torch or of Python on one node, another
config, or a GPU less would be found out after hours, as other losses or as a hang. No torch is loaded here.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise import __version__
from shardwise.cluster.describe.machine import Gpu, Machine, this_machine
from shardwise.errors import Exit, UserError
from shardwise.spec.schema import Config

SAME = {"code": "code of shardwise", "torch": "torch", "python": "Python", "asked": "config", "attempt": "start"}
"""What must be equal on all nodes, and its name in a refusal."""


@cache
def code_digest() -> str:
    """Returns a digest of the code of this package as it lies here."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(root.rglob("*")):
        if file.suffix in (".py", ".toml", ".json") and file.is_file():
            digest.update(f"{file.relative_to(root)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    """Returns the versions that ranks must share."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        torch = "none"
    return {
        "code": f"{__version__} ({code_digest()})",
        "torch": torch,
        "python": ".".join(platform.python_version_tuple()[:2]),
    }


def config_digest(config: Config) -> str:
    """Returns a digest of what a config asks for; each node may name its own network interface."""
    same = replace(config, comm=replace(config.comm, interface=None))
    return hashlib.sha256(repr(same).encode()).hexdigest()[:16]


def hello(index: int, asked: str, attempt: int, name: str = "") -> dict[str, Any]:
    """Returns what this node says of itself. `asked`: a digest of what its command asks for. `name`: what the scheduler
    calls it, by which it can be left out."""
    machine = this_machine()
    gpus = [[gpu.name, gpu.memory_bytes, *gpu.capability, gpu.peers] for gpu in machine.gpus]
    return {
        "index": index,
        "host": name or socket.gethostname(),
        **versions(),
        "asked": asked,
        "attempt": attempt,
        "cores": machine.cores,
        "memory": machine.memory_bytes,
        "gpus": gpus,
        "gpu_problem": machine.gpu_problem,
        "time": time.time(),
    }


def named(index: int, said: Mapping[str, Any], kind: str = "node") -> str:
    """Returns how a node, or a rank, is called in what people read."""
    return f"{kind} {index} ({said.get('host', '?')})"


def check_same(hellos: Mapping[int, Mapping[str, Any]], kind: str = "node") -> None:
    """Refuses nodes, or ranks, that do not go together, and names the ones that differ from the first."""
    first = hellos[0]
    for key, what in SAME.items():
        odd = [index for index, said in sorted(hellos.items()) if said.get(key) != first.get(key)]
        if not odd:
            continue
        other = hellos[odd[0]]
        others = f" and {len(odd) - 1} more" if len(odd) > 1 else ""
        why = f"{other.get(key)} there, {first.get(key)} on {kind} 0; ranks of one job must compute the same"
        fix = f"the same installation on every node; until then leave {other.get('host')} out of the job"
        if key == "asked":
            why = "their commands, config files or `section.key=value` words differ"
            fix = f"start every {kind} with the same command and the same file"
        raise UserError(
            f"{named(odd[0], other, kind)}{others} has another {what} than {named(0, first, kind)}", why=why, fix=fix
        )


def check_nodes(hellos: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuses nodes that do not go together."""
    check_same(hellos)
    counts = {index: len(said["gpus"]) for index, said in hellos.items()}
    if len(set(counts.values())) > 1:
        fewest = min(counts, key=lambda index: counts[index])
        problem = hellos[fewest].get("gpu_problem")
        raise UserError(
            f"{named(fewest, hellos[fewest])} has {counts[fewest]} GPUs, others have {max(counts.values())}",
            why=problem or "every node of a job starts as many ranks as the others",
            fix=f"leave {hellos[fewest]['host']} out of the job, or --nproc {max(1, counts[fewest])} on every node",
            code=Exit.HARDWARE,
        )


def machine_of(hellos: Mapping[int, Mapping[str, Any]]) -> Machine:
    """Returns all nodes as one machine: what the smallest has, as often as there are nodes."""
    count, own = len(hellos), this_machine()
    gpus = tuple(
        Gpu(str(name), int(memory), (int(major), int(minor)), peers)
        for _, said in sorted(hellos.items())
        for name, memory, major, minor, peers in said["gpus"]
    )
    cores, memory = (min(int(said[key]) for said in hellos.values()) for key in ("cores", "memory"))
    return replace(own, cores=count * cores, memory_bytes=count * memory, gpus=gpus, nodes=count)
