"""Reads which pod of a job this is: of an Indexed Job or a JobSet, or of Kubeflow's TrainJob and PyTorchJob."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.launch.head_address import given_heads
from shardwise.launch.place import NodePlace, port_of_job, position, secret_of_job

INDEXES = ("JOB_COMPLETION_INDEX", "PET_NODE_RANK", "RANK")
"""Who says which pod this is: Kubernetes for indexed jobs, Kubeflow for torch's, its older operator for PyTorchJob."""

FIX = "SHARDWISE_HEAD=<job>-0.<service>, as in the manifest of `shardwise launch k8s`"


def detect(environ: Mapping[str, str]) -> NodePlace | None:
    """Returns the place of a pod. How many there are is in no variable of an Indexed Job: SHARDWISE_NODES says it, also
    for one whose pods are runs of their own (1)."""
    if "JOB_COMPLETION_INDEX" not in environ and "KUBERNETES_SERVICE_HOST" not in environ:
        return None
    index_name = next((name for name in INDEXES if name in environ), None)
    if index_name is None or (index_name == "RANK" and "SHARDWISE_NODES" not in environ):
        return None
    settings = {"SHARDWISE_NODES": environ.get("PET_NNODES", ""), "SHARDWISE_HEAD": environ.get("PET_MASTER_ADDR", "")}
    settings |= {name: value for name, value in environ.items() if value}
    if settings["SHARDWISE_NODES"] == "1":
        return None
    index, count = position(settings, index_name, "SHARDWISE_NODES")
    heads = given_heads(settings, count, FIX)
    return NodePlace(
        scheduler="kubernetes",
        job=heads[0],
        index=index,
        count=count,
        heads=heads,
        port=port_of_job(settings, heads[0]),
        secret_file=secret_of_job(settings),
    )
