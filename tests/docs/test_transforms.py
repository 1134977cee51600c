"""The page about what becomes of the plain decoder shows the list that the code goes through."""

from __future__ import annotations

import ast
from pathlib import Path

from shardwise.parallel.transforms import transform_rows

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "transforms.md"


def table() -> str:
    rows = [("", "transform", "takes the place of", "what comes instead", "when")]
    rows += [(str(number), *row) for number, row in enumerate(transform_rows(), 1)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---|---|---|---|---|", *lines[1:]])


def test_the_page_has_every_transform_in_order() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), f"the table should be\n{table()}"


def test_classes_and_files_that_the_list_names_are_there() -> None:
    package = ROOT / "src" / "shardwise"
    classes = {
        node.name
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    }
    for _, _, by, _ in transform_rows():
        for word in by.replace("(", " ").replace(")", " ").replace(",", " ").split():
            name = word.strip("`")
            if word != name and name[0].isupper():
                assert name in classes, word
            elif "/" in word:
                assert (package / word).exists(), word


def test_the_plain_model_imports_nothing_but_torch_spec_and_errors() -> None:
    for file in (ROOT / "src" / "shardwise" / "model").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            named = [node.module] if isinstance(node, ast.ImportFrom) else []
            named += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in named:
                rooms = ("shardwise.model", "shardwise.spec", "shardwise.errors")
                assert not name.startswith("shardwise") or name.startswith(rooms), (file.name, name)
