"""Reads the documents of a manifest with the line of every value. PyYAML is an extra, and loaded here alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardwise.errors import UserError

Path = tuple[Any, ...]
MOST_ANCHORS = 100  # aliases of one value: text that unfolds to a thousand times its size is no manifest


class Tree:
    """One document: its plain values, and the line of each by its path."""

    def __init__(self, value: Any, lines: dict[Path, int]):
        self.value, self.lines = value, lines

    def at(self, *path: Any) -> Any:
        """Returns what is below a path, or None."""
        found = self.value
        for key in path:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    def line(self, *path: Any) -> int:
        """Returns the line of a path, or of the nearest above it that there is."""
        while path not in self.lines and path:
            path = path[:-1]
        return self.lines.get(path, 1)


def documents_of(text: str, name: str) -> list[Tree]:
    """Returns the documents of a manifest. Text that is no YAML is refused with its line."""
    try:
        import yaml
    except ImportError:
        raise UserError(
            "manifests are YAML, and no reader of it is installed",
            why="batch scripts are read without one",
            fix="pip install 'shardwise[kubernetes]'",
        ) from None
    if text.count("*") > MOST_ANCHORS and text.count("&") > MOST_ANCHORS:
        raise UserError(f"{name} has hundreds of aliases", why="no manifest has", fix="write the values out")
    try:
        nodes = list(yaml.compose_all(text, yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{name}:{mark.line + 1}" if mark else name
        why = str(getattr(error, "problem", None) or "it cannot be read")
        raise UserError(f"{name} is no YAML", why=why, fix="mend it there", where=where) from None
    trees = []
    for node in nodes:
        if node is None:
            continue
        lines: dict[Path, int] = {}
        trees.append(Tree(_value(node, (), lines, yaml), lines))
    return trees


def _value(node: Any, path: Path, lines: dict[Path, int], yaml: Any) -> Any:
    lines[path] = node.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        found = {}
        for key, value in node.value:
            name = key.value
            found[name] = _value(value, (*path, name), lines, yaml)
            lines[(*path, name)] = key.start_mark.line + 1
        return found
    if isinstance(node, yaml.SequenceNode):
        return [_value(one, (*path, number), lines, yaml) for number, one in enumerate(node.value)]
    return yaml.SafeLoader("").construct_object(node)


def walk(tree: Tree, *path: Any) -> Iterator[tuple[Path, Any]]:
    """Yields every value below a path with its own path."""
    value = tree.at(*path)
    yield path, value
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, _ in below:
        yield from walk(tree, *path, key)
