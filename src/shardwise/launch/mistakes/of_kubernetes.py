"""The mistakes of manifests for Kubernetes, one function each. With a plan they are compared with what it needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.config.units import format_bytes, parse_bytes
from shardwise.errors import Exit
from shardwise.launch.mistakes.manifest_tree import Path, Tree, documents_of, walk
from shardwise.launch.mistakes.mistake import Mistake, local_run_dir, loopback_head, not_resumed, written_secret
from shardwise.launch.spec import LaunchSpec

AGAIN = {int(Exit.STOPPED), int(Exit.HARDWARE)}
NEVER_AGAIN = {int(code) for code in (Exit.USER_MISTAKE, Exit.OUT_OF_MEMORY, Exit.DIVERGED, Exit.BUG)}
DEFAULT_GRACE_S = 30
OUTLIVING = {"persistentVolumeClaim", "nfs", "csi", "cephfs"}
"""Kinds of volumes that are there after the pod."""


@dataclass(frozen=True)
class Manifest:
    """The documents, and where in them jobs and pods are."""

    trees: list[Tree]
    jobs: list[tuple[Tree, Path]]  # the spec of a Job
    pods: list[tuple[Tree, Path]]  # the spec of a pod that trains


Check = Callable[[Manifest, LaunchSpec | None], Iterator[Mistake]]


def mistakes_of_kubernetes(text: str, plan: LaunchSpec | None, name: str) -> list[Mistake]:
    """Returns the mistakes of a manifest in the order of their lines."""
    trees = documents_of(text, name)
    everything = [(tree, path, value) for tree in trees for path, value in walk(tree)]
    jobs = [
        (tree, path)
        for tree, path, value in everything
        if isinstance(value, dict) and "template" in value and ({"completions", "parallelism"} & value.keys())
    ]
    jobs += [(tree, ("spec",)) for tree in trees if tree.at("kind") == "Job" and (tree, ("spec",)) not in jobs]
    pods = [
        (tree, path)
        for tree, path, value in everything
        if isinstance(value, dict) and isinstance(value.get("containers"), list) and _trains(value)
    ]
    manifest = Manifest(trees, jobs, pods)
    return sorted({found for check in CHECKS for found in check(manifest, plan)}, key=lambda one: (one.line, one.what))


def _words(container: Any) -> list[str]:
    """Returns the command and the arguments of a container as one list of texts."""
    if not isinstance(container, dict):
        return []
    return [word for key in ("command", "args") for word in _texts(container.get(key))]


def _texts(value: Any) -> list[str]:
    return [str(one) for one in value] if isinstance(value, list) else []


def _trains(pod: dict[str, Any]) -> bool:
    return any(re.search(r"\b(?:shardwise|torchrun|train)", " ".join(_words(one))) for one in pod["containers"])


def _containers(manifest: Manifest) -> Iterator[tuple[Tree, Path, dict[str, Any]]]:
    for tree, path in manifest.pods:
        for number, container in enumerate(tree.at(*path, "containers")):
            if isinstance(container, dict):
                yield tree, (*path, "containers", number), container


def _environment(manifest: Manifest) -> Iterator[tuple[int, str, str]]:
    """Yields (line, name, value) of every variable that has its value in the manifest."""
    for tree, path, container in _containers(manifest):
        for number, one in enumerate(_mappings(container.get("env"))):
            if "value" in one:
                yield tree.line(*path, "env", number, "value"), str(one.get("name")), str(one["value"])


def _mappings(value: Any) -> list[dict[str, Any]]:
    """Returns a list with an empty mapping in place of whatever is none: people's files hold anything."""
    return [one if isinstance(one, dict) else {} for one in value] if isinstance(value, list) else []


def _below(value: Any, *keys: str) -> dict[str, Any]:
    """Returns the mapping below some keys; empty where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def _codes(rule: dict[str, Any], asked: set[int]) -> set[int]:
    """Returns those of the exit codes that a rule is about."""
    on = rule.get("onExitCodes")
    if not isinstance(on, dict) or not isinstance(on.get("values"), list):
        return set()
    named = {code for code in on["values"] if isinstance(code, int)}
    return asked - named if on.get("operator") == "NotIn" else asked & named


def _volume_at(tree: Tree, path: Path, container: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the volume that is mounted at a place of a container; empty where there is none."""
    volumes = {str(one.get("name")): one for one in _mappings(tree.at(*path[:-2], "volumes"))}
    mounts = _mappings(container.get("volumeMounts"))
    name = next((str(one.get("name")) for one in mounts if one.get("mountPath") == place), "")
    return volumes.get(name, {})


def not_all_at_once(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path in manifest.jobs:
        count, parallel = tree.at(*path, "completions"), tree.at(*path, "parallelism")
        if isinstance(count, int) and count > 1 and parallel != count:
            yield Mistake(
                tree.line(*path, "parallelism"),
                f"{parallel or 1} of {count} pods run at a time",
                "ranks wait for each other: the first pods wait for ever for those that are not started",
                f"parallelism: {count}",
            )
        if isinstance(count, int) and count > 1 and tree.at(*path, "completionMode") != "Indexed":
            yield Mistake(
                tree.line(*path, "completionMode"),
                "pods have no number: completionMode is not Indexed",
                "without JOB_COMPLETION_INDEX no pod knows which node it is",
                "completionMode: Indexed",
            )
        if plan and isinstance(count, int) and count != plan.nodes:
            yield Mistake(
                tree.line(*path, "completions"),
                f"completions: {count}",
                plan.why["nodes"],
                f"completions: {plan.nodes}",
            )


def failures(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    only_checks = any("--preflight" in _words(container) for _, _, container in _containers(manifest))
    for tree, path in manifest.jobs:
        if tree.at(*path, "backoffLimit") == 0 and not only_checks:
            yield Mistake(
                tree.line(*path, "backoffLimit"),
                "backoffLimit: 0 gives up at the first fault",
                "one lost machine ends the training",
                f"backoffLimit: {5 * (plan.nodes if plan else 4)}, with a podFailurePolicy for mistakes",
            )
        rules = tree.at(*path, "podFailurePolicy", "rules")
        if not isinstance(rules, list) or not rules:
            yield Mistake(
                tree.line(*path),
                "no podFailurePolicy",
                "a mistake in the config is tried again and again, and a drained machine counts as a failure",
                "FailJob on 2, 3, 4 and 6, Ignore on 75, Count on 5",
            )
            continue
        for number, rule in enumerate(_mappings(rules)):
            codes = _codes(rule, AGAIN | NEVER_AGAIN)
            if rule.get("action") == "FailJob" and codes & AGAIN:
                yield Mistake(
                    tree.line(*path, "podFailurePolicy", "rules", number),
                    f"exit code {', '.join(map(str, sorted(codes & AGAIN)))} fails the job",
                    "75 is stopped on purpose with its work saved, 5 is hardware or network: both go on",
                    "take them out of this rule",
                )
            if rule.get("action") == "Ignore" and codes & NEVER_AGAIN:
                yield Mistake(
                    tree.line(*path, "podFailurePolicy", "rules", number),
                    f"exit code {', '.join(map(str, sorted(codes & NEVER_AGAIN)))} starts again for ever",
                    "a config, memory or a loss that failed once fails again",
                    "action: FailJob",
                )


def restarts_in_place(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path in manifest.jobs:
        if tree.at(*path, "template", "spec", "restartPolicy") != "Never":
            yield Mistake(
                tree.line(*path, "template", "spec", "restartPolicy"),
                "restartPolicy is not Never",
                "the pod starts again in place, whatever its exit code is, and podFailurePolicy is not asked",
                "restartPolicy: Never",
            )


def too_little_time(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path in manifest.pods:
        grace = tree.at(*path, "terminationGracePeriodSeconds")
        needed = plan.grace_s if plan else DEFAULT_GRACE_S + 1
        if (grace if isinstance(grace, int) else DEFAULT_GRACE_S) < needed:
            yield Mistake(
                tree.line(*path, "terminationGracePeriodSeconds"),
                f"pods are killed {grace or DEFAULT_GRACE_S} s after they are told to end",
                plan.why["grace"] if plan else "a step has to end and its state has to be written in that time",
                f"terminationGracePeriodSeconds: {plan.grace_s if plan else 300}",
            )
    for tree, path in manifest.jobs:
        limit = tree.at(*path, "activeDeadlineSeconds")
        if plan and isinstance(limit, int) and limit < plan.seconds:
            yield Mistake(
                tree.line(*path, "activeDeadlineSeconds"),
                f"the job fails after {limit} s",
                f"the training may take {plan.seconds} s: {plan.why['time']}",
                f"activeDeadlineSeconds: {plan.seconds}, or none",
            )


def shared_memory(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path, container in _containers(manifest):
        directory = _volume_at(tree, path, container, "/dev/shm").get("emptyDir")
        if not isinstance(directory, dict) or directory.get("medium") != "Memory":
            yield Mistake(
                tree.line(*path, "volumeMounts"),
                "/dev/shm is the container's own, of 64 MiB",
                "NCCL and data loaders share memory there: `bus error` or `no space left on device`",
                "an emptyDir with medium: Memory, mounted at /dev/shm",
            )


def where_runs_go(manifest: Manifest, plan: LaunchSpec | None) -> Iterator[Mistake]:
    for tree, path, container in _containers(manifest):
        places = [str(one.get("mountPath")) for one in _mappings(container.get("volumeMounts"))]
        kept = [at for at in places if OUTLIVING & _volume_at(tree, path, container, at).keys()]
        for key in ("command", "args"):
            for number, word in enumerate(_texts(container.get(key))):
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
    for tree, path, container in _containers(manifest):
        limits = _below(container, "resources", "limits")
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
    for line, name, value in _environment(manifest):
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
    named = {name: value for _, name, value in _environment(manifest)}
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
            security = _below(container, "securityContext")
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
    for tree, path, container in _containers(manifest):
        words = " ".join(_words(container))
        if "shardwise" in words:
            yield from not_resumed(tree.line(*path, "args" if container.get("args") else "command"), words)


CHECKS: tuple[Check, ...] = (
    not_all_at_once,
    failures,
    restarts_in_place,
    too_little_time,
    shared_memory,
    where_runs_go,
    needs,
    environment,
    services,
    rights,
    begins_anew,
)
