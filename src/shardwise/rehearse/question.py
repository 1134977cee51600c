"""What is to be rehearsed, from a config: the plan as the ranks will run it, its cluster, and what was predicted.

The plan may be for a cluster of any size: nothing insists on this machine, which only counts where no cluster is named.
The program is that of CPUs, whatever the devices are: torch builds without CUDA have no other, and what a GPU does
otherwise (compiled blocks, kernels of its own, one group per direction of a pipeline) changes no call and holds no
more. The prediction is for the real devices. No torch here.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.cluster.describe.here import this_cluster
from shardwise.cluster.describe.machine import this_machine
from shardwise.cluster.describe.read import read_cluster
from shardwise.errors import UserError
from shardwise.launch.verify import plan_to_prove
from shardwise.plan.answer.plan_files import cluster_named
from shardwise.plan.prediction.predict import predict
from shardwise.plan.resolve.fit import rank_memory_limit
from shardwise.plan.resolve.speed import with_speed
from shardwise.run.build import model_spec
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job, job_of
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.prediction import Prediction
from shardwise.spec.schema import Config

if TYPE_CHECKING:
    from shardwise.config.load import Loaded


@dataclass(frozen=True)
class RehearsalQuestion:
    """A job that can be rehearsed."""

    config: Config
    spec: ModelSpec
    plan: Plan  # as it is rehearsed
    on_cluster: Plan  # as the cluster's devices run it: what is predicted
    cluster: ClusterSpec
    job: Job
    prediction: Prediction
    limit: int  # bytes of a device
    room: int | None = None  # bytes that are free where states are offloaded to, if all ranks run on this machine


def ask_rehearsal(loaded: Loaded, path: str | None, nproc: int | None, cluster: str | None) -> RehearsalQuestion:
    """Returns the question. `cluster`: the words of a command line; by default what a row of `plan` says it is for,
    else this machine."""
    spec = model_spec(loaded.config.model)
    resolved = plan_to_prove(loaded, spec, nproc)
    config, plan = resolved.config, resolved.plan
    words = cluster or (cluster_named(Path(path)) if path else None)
    hardware = this_cluster(this_machine()) if words is None else read_cluster(words)
    if words is not None and plan.world > hardware.world:
        raise UserError(
            f"{plan.layout} has {plan.world} ranks, {hardware.name} has {hardware.world} devices",
            why="every rank has a device of its own",
            fix="--cluster with as many devices, or a smaller layout",
        )
    on_cluster = _on(hardware, plan, config, spec)
    limit = loaded.config.memory.limit
    if limit != "auto":
        most = int(limit)
    elif words is None:
        most = rank_memory_limit(loaded.config, this_machine(), on_cluster)
    else:
        most = hardware.device.memory
    job = job_of(config, on_cluster)
    prediction = predict(spec, hardware, job, on_cluster)
    room = _room(Path(plan.offload_dir)) if plan.offload_to == "nvme" and words is None else None
    return RehearsalQuestion(config, spec, plan, on_cluster, hardware, job, prediction, most, room)


def _room(directory: Path) -> int:
    """Returns the bytes that are free in a directory, which a run may have to make first."""
    there = next(path for path in (directory, *directory.resolve().parents) if path.is_dir())
    return shutil.disk_usage(there).free


def _on(cluster: ClusterSpec, plan: Plan, config: Config, spec: ModelSpec) -> Plan:
    """Returns the plan as the devices of a cluster run it."""
    if cluster.device.kind == "cpu":
        return plan
    return with_speed(replace(plan, device="cuda"), config.speed, spec)
