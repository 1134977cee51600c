"""Writes the manifest of a job for Kubernetes: by default an Indexed Job and a headless Service, which need no
operator; JobSet, Kubeflow's TrainJob and its older PyTorchJob on request.

Invariants: the job's secret is in no manifest, pods have it from a Secret; they listen to each other alone. What a pod
is says kubernetes_pod.py, what starts it kubernetes_jobs.py. Read next: kubernetes.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.launch.schedulers.kubernetes_jobs import KINDS
from shardwise.launch.schedulers.kubernetes_pod import (
    LABEL,
    PLAN_AT,
    PodOptions,
    env_secret_name,
    metadata,
    secret_name,
)
from shardwise.launch.schedulers.yaml_text import Noted, document
from shardwise.launch.spec import LaunchSpec


def manifest(spec: LaunchSpec, options: PodOptions, origin: str) -> str:
    """Returns the text of the manifest. `origin` is the command line that it was made by."""
    spec = in_pods(spec, options)
    documents = [_plan_map(spec, options), *KINDS[options.kind](spec, options), _network_policy(spec, options)]
    kubectl = f"kubectl{_in_namespace(options)}"
    head = [
        f"# Written by `{origin}`.",
        f"# {spec.predicted}",
        "# The job's secret is not in here. --submit makes one; by hand, once:",
        "#   head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \\n' \\",
        f"#     | {kubectl} create secret generic {secret_name(spec)} --from-file=secret=/dev/stdin",
    ]
    if spec.private:
        literals = " ".join(f'--from-literal={name}="${name}"' for name in spec.private)
        head.append(f"#   {kubectl} create secret generic {env_secret_name(spec)} {literals}")
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
    named = [(secret_name(spec), {"secret": secret}), *([(env_secret_name(spec), values)] if values else [])]
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata(name, spec, options), "stringData": data}
        for name, data in named
    ]


def _in_namespace(options: PodOptions) -> str:
    return f" --namespace {options.namespace}" if options.namespace else ""


def _plan_map(spec: LaunchSpec, options: PodOptions) -> dict[str, Any]:
    file = Path(spec.parts[0].file).name
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(f"{spec.name}-plan", spec, options),
        "data": Noted({file: spec.plan_text}, "the config file, as it was when this was written"),
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
        "metadata": metadata(spec.name, spec, options),
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
