"""Finds the mistakes of manifests for Kubernetes. With a plan they are compared with what it needs."""

from __future__ import annotations

import re
from typing import Any

from shardwise.launch.mistakes import kubernetes_jobs, kubernetes_pods
from shardwise.launch.mistakes.manifest_tree import documents_of, walk
from shardwise.launch.mistakes.manifest_view import Check, Manifest, words_of
from shardwise.launch.mistakes.mistake import Mistake
from shardwise.launch.spec import LaunchSpec


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


def _trains(pod: dict[str, Any]) -> bool:
    return any(re.search(r"\b(?:shardwise|torchrun|train)", " ".join(words_of(one))) for one in pod["containers"])


CHECKS: tuple[Check, ...] = (
    kubernetes_jobs.not_all_at_once,
    kubernetes_jobs.failures,
    kubernetes_jobs.restarts_in_place,
    kubernetes_jobs.too_little_time,
    kubernetes_pods.shared_memory,
    kubernetes_pods.where_runs_go,
    kubernetes_pods.needs,
    kubernetes_pods.environment,
    kubernetes_pods.services,
    kubernetes_pods.rights,
    kubernetes_pods.begins_anew,
)
