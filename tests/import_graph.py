"""Who imports whom in `src/shardwise`, read from the syntax tree: for tests/package/test_imports.py and
docs/house.md."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "shardwise"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))


@dataclass(frozen=True)
class Import:
    """One imported module. `at_start`: at module level and not only for type checkers."""

    file: str
    module: str
    at_start: bool

    @property
    def room(self) -> str | None:
        """The room (or file) of this package that is imported, None for other packages."""
        return [*self.module.split("."), ""][1] if self.module.split(".")[0] == "shardwise" else None


def room_of(file: Path) -> str:
    """The room that a file belongs to, also from a folder inside it; the file's own name beside the rooms."""
    return file.relative_to(PACKAGE).parts[0]


@cache
def imports_of(file: Path) -> list[Import]:
    """Every import of a file, those inside functions and those for type checkers included."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return list(_walk(tree, file.relative_to(PACKAGE).as_posix(), at_start=True))


def _walk(node: ast.AST, file: str, at_start: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(file, alias.name, at_start) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0 and child.module, f"{file}: imports are absolute"
            if child.module == "shardwise":
                yield from (Import(file, f"shardwise.{alias.name}", at_start) for alias in child.names)
            else:
                yield Import(file, child.module, at_start)
        later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        types_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
        yield from _walk(child, file, at_start and not later and not types_only)


@cache
def arrows() -> dict[str, frozenset[str]]:
    """Room -> the rooms that it imports anywhere."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for file in FILES:
        if (room := room_of(file)) in found:
            found[room] |= {item.room for item in imports_of(file) if item.room in found and item.room != room}
    return {room: frozenset(named) for room, named in found.items()}


def reachable(room: str, graph: dict[str, frozenset[str]]) -> set[str]:
    """Every room that `room` imports, also through others; itself if there is a cycle."""
    seen: set[str] = set()
    waiting = list(graph[room])
    while waiting:
        one = waiting.pop()
        if one not in seen:
            seen.add(one)
            waiting += graph[one]
    return seen
