"""What a manifest has for those who look for mistakes in it: its jobs, its pods that train, their containers and
variables. People's files hold anything, so whatever is not of the kind that is looked for counts as empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.launch.mistakes.manifest_tree import Path, Tree
from shardwise.launch.mistakes.mistake import Mistake
from shardwise.launch.spec import LaunchSpec


@dataclass(frozen=True)
class Manifest:
    """The documents, and where in them jobs and pods are."""

    trees: list[Tree]
    jobs: list[tuple[Tree, Path]]  # the spec of a Job
    pods: list[tuple[Tree, Path]]  # the spec of a pod that trains


Check = Callable[[Manifest, LaunchSpec | None], Iterator[Mistake]]


def words_of(container: Any) -> list[str]:
    """Returns the command and the arguments of a container as one list of texts."""
    if not isinstance(container, dict):
        return []
    return [word for key in ("command", "args") for word in texts_of(container.get(key))]


def texts_of(value: Any) -> list[str]:
    """Returns the entries of a list as texts."""
    return [str(one) for one in value] if isinstance(value, list) else []


def containers(manifest: Manifest) -> Iterator[tuple[Tree, Path, dict[str, Any]]]:
    """Yields the containers of all pods that train, with where they stand."""
    for tree, path in manifest.pods:
        for number, container in enumerate(tree.at(*path, "containers")):
            if isinstance(container, dict):
                yield tree, (*path, "containers", number), container


def variables(manifest: Manifest) -> Iterator[tuple[int, str, str]]:
    """Yields (line, name, value) of every variable that has its value in the manifest."""
    for tree, path, container in containers(manifest):
        for number, one in enumerate(mappings(container.get("env"))):
            if "value" in one:
                yield tree.line(*path, "env", number, "value"), str(one.get("name")), str(one["value"])


def mappings(value: Any) -> list[dict[str, Any]]:
    """Returns a list with an empty mapping in place of whatever is none: people's files hold anything."""
    return [one if isinstance(one, dict) else {} for one in value] if isinstance(value, list) else []


def below(value: Any, *keys: str) -> dict[str, Any]:
    """Returns the mapping below some keys; empty where there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


def volume_at(tree: Tree, path: Path, container: dict[str, Any], place: str) -> dict[str, Any]:
    """Returns the volume that is mounted at a place of a container; empty where there is none."""
    volumes = {str(one.get("name")): one for one in mappings(tree.at(*path[:-2], "volumes"))}
    mounts = mappings(container.get("volumeMounts"))
    name = next((str(one.get("name")) for one in mounts if one.get("mountPath") == place), "")
    return volumes.get(name, {})
