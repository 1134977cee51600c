"""The mistakes of pods in manifests: memory, volumes, what they ask for, how they find each other, what they may do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardwise.config.units import format_bytes, parse_bytes
from shardwise.launch.mistakes.manifest_view import (
    Manifest,
    below,
    containers,
    mappings,
    texts_of,
    variables,
    volume_at,
    words_of,
)
from shardwise.launch.mistakes.mistake import Mistake, local_run_dir, loopback_head, not_resumed, written_secret
from shardwise.launch.spec import LaunchSpec

OUTLIVING = {"persistentVolumeClaim", "nfs", "csi", "cephfs"}
"""Kinds of volumes that are there after the pod."""


def shared_memory(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path, container in containers(manifest):
        directory = volume_at(tree, path, container, "/dev/shm").get("emptyDir")
        if not isinstance(directory, dict) or directory.get("medium") != "Memory":
            yield Mistake(
                tree.line(*path, "volumeMounts"),
                "/dev/shm is the container's own, of 64 MiB",
                "NCCL and data loaders share memory there: `bus error` or `no space left on device`",
                "an emptyDir with medium: Memory, mounted at /dev/shm",
            )


def where_runs_go(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path, container in containers(manifest):
        places = [str(one.get("mountPath")) for one in mappings(container.get("volumeMounts"))]
        kept = [at for at in places if OUTLIVING & volume_at(tree, path, container, at).keys()]
        for key in ("command", "args"):
            for number, word in enumerate(texts_of(container.get(key))):
                for found in re.findall(r"\brun\.dir=(\S+)", word):
                    line = tree.line(*path, key, number)
                    local = list(local_run_dir(line, found))
                    yield from local
                    if not local and not any(found == at or found.startswith(at.rstrip("/") + "/") for at in kept):
                        yield Mistake(
                            line,
                            f"runs go to {found}, which is on no volume that outlives the pod",
                            "a pod that is replaced begins at step 0",
                            "mount a PersistentVolumeClaim there",
                        )


def needs(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path, container in containers(manifest):
        limits = below(container, "resources", "limits")
        if plan is None:
            continue
        gpus = next((str(limits[name]) for name in limits if name.endswith("/gpu")), None)
        if plan.gpus_per_node and gpus != str(plan.gpus_per_node):
            yield Mistake(
                tree.line(*path, "resources", "limits"),
                f"{gpus or 'no'} GPUs per pod are asked for, and the plan has {plan.gpus_per_node}",
                plan.why["gpus"],
                f'nvidia.com/gpu: "{plan.gpus_per_node}"',
            )
        memory = _bytes(limits.get("memory"))
        if memory is not None and memory < plan.memory_bytes:
            yield Mistake(
                tree.line(*path, "resources", "limits", "memory"),
                f"a pod has {format_bytes(memory)} of memory, and the plan needs {format_bytes(plan.memory_bytes)}",
                plan.why["memory"],
                f"memory: {-(-plan.memory_bytes // 2**20)}Mi",
            )


def _bytes(text: Any) -> int | None:
    """Returns the bytes of a quantity of Kubernetes such as 64Gi; None where there is none."""
    if text is None:
        return None
    try:
        return parse_bytes(re.sub(r"^(\d+(?:\.\d+)?)([KMGTP]i?)$", r"\1\2B", str(text)))
    except ValueError:
        return None


def environment(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for line, name, value in variables(manifest):
        yield from loopback_head(line, name, value)
        yield from written_secret(line, name, value)
    for tree in manifest.trees:
        if tree.at("kind") == "Secret":
            for key in ("stringData", "data"):
                if tree.at(key):
                    yield Mistake(
                        tree.line(key),
                        "a Secret stands beside the job, with its value",
                        "whoever can read the file has it, and so has every copy in version control",
                        "kubectl create secret generic NAME --from-file=FILE, once",
                    )
    named = {name: value for _, name, value in variables(manifest)}
    for tree, path in manifest.jobs:
        count = tree.at(*path, "completions")
        if tree.at(*path, "completionMode") == "Indexed" and isinstance(count, int) and count > 1:
            line = tree.line(*path, "template", "spec", "containers", 0, "env")
            if named.get("SHARDWISE_NODES") != str(count):
                yield Mistake(
                    line,
                    f"SHARDWISE_NODES is {named.get('SHARDWISE_NODES', 'not set')}, and there are {count} pods",
                    "an Indexed Job tells a pod its number, and not how many there are",
                    f'SHARDWISE_NODES with value "{count}"',
                )
            if "SHARDWISE_HEAD" not in named:
                yield Mistake(
                    line,
                    "SHARDWISE_HEAD is not set",
                    "the pods cannot find pod 0",
                    "SHARDWISE_HEAD with value <job>-0.<service>, and a headless Service",
                )


def services(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    names: set[str] = set()
    for tree in manifest.trees:
        if tree.at("kind") != "Service":
            continue
        names.add(str(tree.at("metadata", "name")))
        if tree.at("spec", "clusterIP") != "None":
            yield Mistake(
                tree.line("spec", "clusterIP"),
                "the Service has an address of its own",
                "names of single pods, such as <job>-0.<service>, exist for headless ones alone",
                'clusterIP: "None"',
            )
        if tree.at("spec", "publishNotReadyAddresses") is not True:
            yield Mistake(
                tree.line("spec"),
                "pods are not found before they are ready",
                "they have to find each other to become so",
                "publishNotReadyAddresses: true",
            )
    for tree in manifest.trees:
        if tree.at("kind") == "Job" and names:
            subdomain = tree.at("spec", "template", "spec", "subdomain")
            if str(subdomain) not in names:
                yield Mistake(
                    tree.line("spec", "template", "spec", "subdomain"),
                    f"subdomain is {subdomain or 'not set'}",
                    f"pods have names only below their Service: {', '.join(sorted(names))}",
                    f"subdomain: {min(names)}",
                )


def rights(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path in manifest.pods:
        if tree.at(*path, "hostNetwork") is True:
            yield Mistake(
                tree.line(*path, "hostNetwork"),
                "pods use their machine's network",
                "their ports are open to all that reach the machine, and two jobs there collide",
                "leave hostNetwork out",
            )
        for number, container in enumerate(tree.at(*path, "containers")):
            security = below(container, "securityContext")
            if security.get("privileged") is True:
                yield Mistake(
                    tree.line(*path, "containers", number, "securityContext", "privileged"),
                    "the container is privileged",
                    "whoever gets into it has the machine",
                    "leave privileged out",
                )
            is_nobody = security.get("runAsNonRoot") or tree.at(*path, "securityContext", "runAsNonRoot")
            if is_nobody is not True:
                yield Mistake(
                    tree.line(*path, "securityContext"),
                    "pods may run as root",
                    "training needs no rights on the machine",
                    "securityContext: {runAsNonRoot: true, runAsUser: 1000}",
                )


def begins_anew(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path, container in containers(manifest):
        words = " ".join(words_of(container))
        if "shardwise" in words:
            yield from not_resumed(tree.line(*path, "args" if container.get("args") else "command"), words)
