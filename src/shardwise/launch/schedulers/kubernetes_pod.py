"""What every pod of a job on Kubernetes is: one node of the job, whatever kind of object makes it.

Invariants: it runs as nobody in particular, on a file system that it cannot write but for what is mounted; it has the
job's secret from a Secret and in no text. Read next: kubernetes_jobs.py, which makes objects of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.config.units import format_bytes
from shardwise.launch.schedulers.yaml_text import Noted
from shardwise.launch.spec import LaunchSpec

PORT = 29_400
PLAN_AT, SECRET_AT, OWN_SECRET_AT = "/etc/shardwise", "/run/secret-of-job", "/run/shardwise"
LABEL = "app.kubernetes.io/instance"
SHM_PER_RANK = 2 * 2**30


@dataclass(frozen=True)
class PodOptions:
    """What a person says about the job that only Kubernetes knows."""

    image: str
    kind: str = "indexed-job"
    namespace: str | None = None
    claims: tuple[tuple[str, str], ...] = (("shardwise-runs", "/runs"),)  # name and path; runs go to the first
    queue: str | None = None  # of Kueue
    user: int = 1000
    node_selector: tuple[tuple[str, str], ...] = ()


def secret_name(spec: LaunchSpec) -> str:
    """Returns the name of the Secret with the job's secret."""
    return f"{spec.name}-secret"


def env_secret_name(spec: LaunchSpec) -> str:
    """Returns the name of the Secret with the person's own variables."""
    return f"{spec.name}-env"


def metadata(name: str, spec: LaunchSpec, options: PodOptions) -> dict[str, Any]:
    """Returns the metadata of an object of this job."""
    return {"name": name, "namespace": options.namespace, "labels": {LABEL: spec.name}}


def pod_template(
    spec: LaunchSpec, options: PodOptions, head: str, container: str = "node", **more: Any
) -> dict[str, Any]:
    """Returns the template of a job's pods. `head` is the name under which node 0 is found."""
    claims = [
        {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": name}}
        for number, (name, _) in enumerate(options.claims)
    ]
    locked = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    return {
        "metadata": {"labels": {LABEL: spec.name}},
        "spec": {
            **more,
            "terminationGracePeriodSeconds": Noted(spec.grace_s, spec.why["grace"]),
            "automountServiceAccountToken": Noted(False, "training asks nothing of the cluster"),
            "enableServiceLinks": False,
            "nodeSelector": dict(options.node_selector) or None,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": options.user,
                "runAsGroup": options.user,
                "fsGroup": options.user,
                "fsGroupChangePolicy": Noted("OnRootMismatch", "large volumes are not walked through at every start"),
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "affinity": {
                "podAntiAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": Noted(
                        [
                            {
                                "labelSelector": {"matchLabels": {LABEL: spec.name}},
                                "topologyKey": "kubernetes.io/hostname",
                            }
                        ],
                        "one node of the job on each machine, as the plan has it",
                    )
                }
            },
            "initContainers": [
                {
                    "name": "secret",
                    "image": options.image,
                    "command": Noted(
                        ["sh", "-c", f"umask 077 && cat {SECRET_AT}/secret >{OWN_SECRET_AT}/secret"],
                        "a mounted Secret can be read by its group; this copy by its owner alone",
                    ),
                    "resources": _resources({"cpu": "100m", "memory": "64Mi"}),
                    "securityContext": locked,
                    "volumeMounts": [
                        {"name": "secret", "mountPath": SECRET_AT, "readOnly": True},
                        {"name": "own-secret", "mountPath": OWN_SECRET_AT},
                    ],
                }
            ],
            "containers": [_container(spec, options, head, container, locked)],
            "volumes": [
                {"name": "plan", "configMap": {"name": f"{spec.name}-plan"}},
                {"name": "secret", "secret": {"secretName": secret_name(spec), "defaultMode": 0o440}},
                {"name": "own-secret", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
                {
                    "name": "shm",
                    "emptyDir": {"medium": "Memory", "sizeLimit": f"{_shm(spec) // 2**20}Mi"},
                },
                {"name": "tmp", "emptyDir": {}},
                *claims,
            ],
        },
    }


def _container(spec: LaunchSpec, options: PodOptions, head: str, name: str, locked: dict[str, Any]) -> dict[str, Any]:
    program, *arguments = spec.command(spec.parts[0])
    env: list[dict[str, Any]] = [
        {"name": "SHARDWISE_NODES", "value": str(spec.nodes)},
        {"name": "SHARDWISE_HEAD", "value": head},
        {"name": "SHARDWISE_PORT", "value": str(PORT)},
        {"name": "SHARDWISE_SECRET_FILE", "value": f"{OWN_SECRET_AT}/secret"},
        {"name": "HOME", "value": "/tmp"},
    ]
    env += [
        {"name": one, "valueFrom": {"secretKeyRef": {"name": env_secret_name(spec), "key": one}}}
        for one in spec.private
    ]
    mebibytes = -(-(spec.memory_bytes + _shm(spec)) // 2**20)
    needs: dict[str, Any] = {
        "cpu": Noted(str(spec.cpus_per_node), spec.why["cpus"]),
        "memory": Noted(f"{mebibytes}Mi", f"{spec.why['memory']}; {format_bytes(_shm(spec))} of /dev/shm"),
    }
    if spec.gpus_per_node:
        vendor = "amd.com/gpu" if spec.gpu.startswith("mi") else "nvidia.com/gpu"
        needs[vendor] = Noted(str(spec.gpus_per_node), spec.why["gpus"])
    return {
        "name": name,
        "image": options.image,
        "command": Noted([program], "the one line of every node, at the start and after every restart"),
        "args": list(arguments),
        "env": env,
        "ports": [{"name": "pytorchjob-port" if name == "pytorch" else "head", "containerPort": PORT}],
        "resources": _resources(needs),
        "securityContext": locked,
        "volumeMounts": [
            {"name": "plan", "mountPath": PLAN_AT, "readOnly": True},
            {"name": "own-secret", "mountPath": OWN_SECRET_AT, "readOnly": True},
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "tmp", "mountPath": "/tmp"},
            *({"name": f"claim-{number}", "mountPath": path} for number, (_, path) in enumerate(options.claims)),
        ],
    }


def _shm(spec: LaunchSpec) -> int:
    return SHM_PER_RANK * spec.ranks_per_node


def _resources(needs: dict[str, Any]) -> dict[str, Any]:
    plain = {name: value.value if isinstance(value, Noted) else value for name, value in needs.items()}
    return {"requests": needs, "limits": plain}
