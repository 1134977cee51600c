"""Writes the manifest of a job for Kubernetes: by default an Indexed Job and a headless Service, which need no
operator; JobSet, Kubeflow's TrainJob and its older PyTorchJob on request.

Invariants: the job's secret is in no manifest, pods have it from a Secret; they run as nobody in particular, on a file
system that they cannot write but for what is mounted; they listen to each other alone. Read next: kubernetes.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardwise.config.units import format_bytes
from shardwise.errors import Exit, UserError
from shardwise.launch.schedulers.yaml_text import Noted, document
from shardwise.launch.spec import LaunchSpec

PORT = 29_400
PLAN_AT, SECRET_AT, OWN_SECRET_AT = "/etc/shardwise", "/run/secret-of-job", "/run/shardwise"
LABEL = "app.kubernetes.io/instance"
SHM_PER_RANK = 2 * 2**30
MOST_RESTARTS = 5
MISTAKES = (1, Exit.USER_MISTAKE, Exit.OUT_OF_MEMORY, Exit.DIVERGED, Exit.BUG, 126, 127)
"""Exit codes after which another start ends as the one before; 1, 126 and 127 are a program that is not there."""


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


def manifest(spec: LaunchSpec, options: PodOptions, origin: str) -> str:
    """Returns the text of the manifest. `origin` is the command line that it was made by."""
    spec = in_pods(spec, options)
    documents = [_plan_map(spec, options), *KINDS[options.kind](spec, options), _network_policy(spec, options)]
    head = [
        f"# Written by `{origin}`.",
        f"# {spec.predicted}",
        "# The job's secret is not in here. --submit makes one; by hand, once:",
        "#   head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n' \\",
        f"#     | kubectl{_in_namespace(options)} create secret generic {_secret(spec)} --from-file=secret=/dev/stdin",
    ]
    if spec.private:
        literals = " ".join(f'--from-literal={name}="${name}"' for name in spec.private)
        head.append(f"#   kubectl{_in_namespace(options)} create secret generic {_env_secret(spec)} {literals}")
    return "\n".join(head) + "\n" + "".join(f"---\n{document(one)}" for one in documents)


def in_pods(spec: LaunchSpec, options: PodOptions) -> LaunchSpec:
    """Returns the job with the paths that pods see: the config file is mounted, runs are on the first claim."""
    part = spec.parts[0]
    if len(spec.parts) > 1:
        raise UserError(
            f"{len(spec.parts)} config files are several jobs",
            why="each pod of an Indexed Job is a node of one run",
            fix="launch them one by one",
        )
    inside = replace(part, file=f"{PLAN_AT}/{Path(part.file).name}")
    return replace(spec, parts=(inside,), run_dir=options.claims[0][1])


def secrets_of(spec: LaunchSpec, options: PodOptions, secret: str, environ: dict[str, str]) -> list[dict[str, Any]]:
    """Returns the Secrets that a manifest names, for `--submit`: they go to kubectl's standard input and nowhere
    else."""
    values = {name: environ[name] for name in spec.private if name in environ}
    named = [(_secret(spec), {"secret": secret}), *([(_env_secret(spec), values)] if values else [])]
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": _meta(name, spec, options), "stringData": data}
        for name, data in named
    ]


def _secret(spec: LaunchSpec) -> str:
    return f"{spec.name}-secret"


def _env_secret(spec: LaunchSpec) -> str:
    return f"{spec.name}-env"


def _in_namespace(options: PodOptions) -> str:
    return f" --namespace {options.namespace}" if options.namespace else ""


def _meta(name: str, spec: LaunchSpec, options: PodOptions) -> dict[str, Any]:
    return {"name": name, "namespace": options.namespace, "labels": {LABEL: spec.name}}


def _plan_map(spec: LaunchSpec, options: PodOptions) -> dict[str, Any]:
    file = Path(spec.parts[0].file).name
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _meta(f"{spec.name}-plan", spec, options),
        "data": Noted({file: spec.plan_text}, "the config file, as it was when this was written"),
    }


# Pods ----------------------------------------------------------------------------------------------------------------


def _pod(spec: LaunchSpec, options: PodOptions, head: str, container: str = "node", **more: Any) -> dict[str, Any]:
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
                {"name": "secret", "secret": {"secretName": _secret(spec), "defaultMode": 0o440}},
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
        {"name": one, "valueFrom": {"secretKeyRef": {"name": _env_secret(spec), "key": one}}} for one in spec.private
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


# Jobs ----------------------------------------------------------------------------------------------------------------


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
        "template": _pod(spec, options, head, restartPolicy="Never", **more),
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
        "metadata": _meta(spec.name, spec, options),
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
        "metadata": _queued(_meta(spec.name, spec, options), options),
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
            "metadata": _queued(_meta(spec.name, spec, options), options),
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
        "metadata": _meta(f"{spec.name}-runtime", spec, options),
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
        "metadata": _queued(_meta(spec.name, spec, options), options),
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
            "template": _pod(spec, options, f"{spec.name}-master-0", "pytorch"),
        }

    others = {"Worker": replicas(spec.nodes - 1)} if spec.nodes > 1 else {}
    return [
        {
            "apiVersion": "kubeflow.org/v1",
            "kind": "PyTorchJob",
            "metadata": _queued(_meta(spec.name, spec, options), options),
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


def _network_policy(spec: LaunchSpec, options: PodOptions) -> dict[str, Any]:
    """Returns who may talk to the job's pods: they themselves. Outside there is the name service, and the addresses of
    data and loggers where the config has some."""
    own = {"podSelector": {"matchLabels": {LABEL: spec.name}}}
    names = {"ports": [{"protocol": kind, "port": 53} for kind in ("UDP", "TCP")]}
    outside = [{"to": [{"ipBlock": {"cidr": block}} for block in ("0.0.0.0/0", "::/0")]}]
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _meta(spec.name, spec, options),
        "spec": {
            "podSelector": own["podSelector"],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": Noted([{"from": [own]}], "the job's own pods, on any port: NCCL and gloo choose theirs"),
            "egress": Noted(
                [{"to": [own]}, names, *(outside if spec.reads_network else [])],
                "the config has addresses outside of the cluster"
                if spec.reads_network
                else "nothing outside: the config has no address there",
            ),
        },
    }
