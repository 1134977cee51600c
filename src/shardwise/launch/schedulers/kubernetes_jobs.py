"""The objects that start the pods of a job again until it is done: an Indexed Job with a headless Service, which need
no operator, and on request a JobSet, Kubeflow's TrainJob or its older PyTorchJob.

Invariant: where the kind can tell exit codes apart, 75 and 5 start again, and what would end the same way does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.errors import Exit
from shardwise.launch.schedulers.kubernetes_pod import LABEL, PORT, PodOptions, metadata, pod_template
from shardwise.launch.schedulers.yaml_text import Noted
from shardwise.launch.spec import LaunchSpec

MOST_RESTARTS = 5
MISTAKES = (1, Exit.USER_MISTAKE, Exit.OUT_OF_MEMORY, Exit.DIVERGED, Exit.BUG, 126, 127)
"""Exit codes after which another start ends as the one before; 1, 126 and 127 are a program that is not there."""


def _job_spec(spec: LaunchSpec, options: PodOptions, head: str, **more: Any) -> dict[str, Any]:
    return {
        "completions": Noted(spec.nodes, spec.why["nodes"]),
        "parallelism": spec.nodes,
        "completionMode": Noted("Indexed", "every pod has a number, and pod 0 is the head"),
        "backoffLimit": Noted(0, "the nodes are checked, once")
        if spec.is_check
        else Noted(
            MOST_RESTARTS * spec.nodes, f"all {spec.nodes} pods may fail {MOST_RESTARTS} times: hardware and network"
        ),
        "podFailurePolicy": {
            "rules": [
                Noted(
                    {"action": "FailJob", "onExitCodes": _codes("In", *MISTAKES)},
                    "the config, memory, the loss or the program: another start would end as this one",
                ),
                Noted(
                    {"action": "Ignore", "onExitCodes": _codes("In", Exit.STOPPED)},
                    "stopped on purpose with its work saved, as when a machine is drained: starts again",
                ),
                Noted(
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    "evicted: starts again",
                ),
                Noted(
                    {"action": "Count", "onExitCodes": _codes("In", Exit.HARDWARE)},
                    "hardware or network: starts again as often as backoffLimit says",
                ),
            ]
        },
        "template": pod_template(spec, options, head, restartPolicy="Never", **more),
    }


def _codes(operator: str, *codes: int) -> dict[str, Any]:
    return {"containerName": "node", "operator": operator, "values": [int(code) for code in codes]}


def _queued(meta: dict[str, Any], options: PodOptions) -> dict[str, Any]:
    """Returns the metadata with the label by which Kueue takes a job into a queue."""
    more = {"kueue.x-k8s.io/queue-name": options.queue} if options.queue else {}
    return {**meta, "labels": {**meta["labels"], **more}}


def _indexed_job(spec: LaunchSpec, options: PodOptions) -> list[dict[str, Any]]:
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(spec.name, spec, options),
        "spec": {
            "clusterIP": Noted("None", "no address of its own: the name of a pod leads to the pod"),
            "publishNotReadyAddresses": Noted(True, "pods find each other while they start"),
            "selector": {LABEL: spec.name},
            "ports": [{"name": "head", "port": PORT}],
        },
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _queued(metadata(spec.name, spec, options), options),
        "spec": {
            "suspend": Noted(True, "Kueue starts it") if options.queue else None,
            **_job_spec(spec, options, f"{spec.name}-0.{spec.name}", subdomain=spec.name),
        },
    }
    return [service, job]


def _job_set(spec: LaunchSpec, options: PodOptions) -> list[dict[str, Any]]:
    return [
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": _queued(metadata(spec.name, spec, options), options),
            "spec": {
                "network": {"enableDNSHostnames": True, "subdomain": spec.name, "publishNotReadyAddresses": True},
                "failurePolicy": {
                    "maxRestarts": MOST_RESTARTS,
                    "rules": [
                        {"name": "mistakes", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
                    ],
                },
                "replicatedJobs": [
                    {
                        "name": "node",
                        "replicas": 1,
                        "template": {"spec": _job_spec(spec, options, f"{spec.name}-node-0-0.{spec.name}")},
                    }
                ],
            },
        }
    ]


def _train_job(spec: LaunchSpec, options: PodOptions) -> list[dict[str, Any]]:
    """Returns a runtime of this job's own, because what a TrainJob may change of one has changed between releases."""
    api = "trainer.kubeflow.org/v1alpha1"
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = {"metadata": {"labels": step}, "spec": _job_spec(spec, options, f"{spec.name}-node-0-0.{spec.name}")}
    runtime = {
        "apiVersion": api,
        "kind": "TrainingRuntime",
        "metadata": metadata(f"{spec.name}-runtime", spec, options),
        "spec": {
            "mlPolicy": {"numNodes": spec.nodes},
            "template": {
                "spec": {
                    "network": {"enableDNSHostnames": True, "subdomain": spec.name, "publishNotReadyAddresses": True},
                    "failurePolicy": {"maxRestarts": MOST_RESTARTS},
                    "replicatedJobs": [{"name": "node", "template": template}],
                }
            },
        },
    }
    job = {
        "apiVersion": api,
        "kind": "TrainJob",
        "metadata": _queued(metadata(spec.name, spec, options), options),
        "spec": {
            "runtimeRef": {
                "apiGroup": api.partition("/")[0],
                "kind": "TrainingRuntime",
                "name": f"{spec.name}-runtime",
            },
            "trainer": {"numNodes": spec.nodes},
        },
    }
    return [runtime, job]


def _pytorch_job(spec: LaunchSpec, options: PodOptions) -> list[dict[str, Any]]:
    def replicas(count: int) -> dict[str, Any]:
        return {
            "replicas": count,
            "restartPolicy": Noted("OnFailure", "this operator does not tell 75 and 5 from mistakes: all start again"),
            "template": pod_template(spec, options, f"{spec.name}-master-0", "pytorch"),
        }

    others = {"Worker": replicas(spec.nodes - 1)} if spec.nodes > 1 else {}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": _queued(metadata(spec.name, spec, options), options),
            "spec": {
                "runPolicy": {"backoffLimit": MOST_RESTARTS, "cleanPodPolicy": "Running"},
                "pytorchReplicaSpecs": {"Master": replicas(1), **others},
            },
        }
    ]


KINDS: dict[str, Callable[[LaunchSpec, PodOptions], list[dict[str, Any]]]] = {
    "indexed-job": _indexed_job,
    "jobset": _job_set,
    "trainjob": _train_job,
    "pytorchjob": _pytorch_job,
}
