"""Every test file runs alone: what it imports stands beside it or at the top of tests/, and no two files have one
name."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from import_graph import ROOMS, ROOT

TESTS = ROOT / "tests"
FILES = sorted(TESTS.rglob("*.py"))
BESIDE_ROOMS = {"docs", "nodes", "package", "parity", "walks"}
"""Folders that are about more than one room."""


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


def test_no_two_files_have_one_name():
    counts = Counter(file.name for file in FILES if file.name not in ("conftest.py", "__init__.py"))
    assert [name for name, count in counts.items() if count > 1] == [], "pytest would take one for the other"


@pytest.mark.parametrize("folder", sorted({file.parent for file in FILES}), ids=lambda path: path.name)
def test_helpers_stand_beside_the_tests_that_use_them_or_at_the_top(folder: Path):
    elsewhere = {file.stem: file.parent for file in FILES if file.parent not in (folder, TESTS)}
    wrong = [
        f"{file.relative_to(TESTS)} imports {elsewhere[name].relative_to(TESTS)}/{name}.py"
        for file in sorted(folder.glob("*.py"))
        for name in imported(ast.parse(file.read_text(encoding="utf-8")))
        if name in elsewhere
    ]
    assert wrong == []


def test_folders_of_tests_are_those_of_the_package():
    folders = {path.name for path in TESTS.iterdir() if any(path.glob("test_*.py"))}
    assert folders - BESIDE_ROOMS <= set(ROOMS)
