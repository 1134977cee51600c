"""No function, class, constant or field of the package is there for its tests alone.

A name counts as used when something in the package reads it, wherever. Two things of one name hide each other, so this
finds less than there may be; what it finds is dead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache

from import_graph import FILES, PACKAGE

FOR_OTHERS = {
    "parallelize": "the public surface",
    "optimizer_state": "the public surface",
    "load_optimizer_state": "the public surface",
    "eval_losses": "the public surface",
    "proven": "the public surface",
    "REPORTS": "cli/main.py looks it up by name in the module of a verb",
    "_should_skip_dynamo": "torch calls it",
    "_fields_": "ctypes reads it",
    "transform_rows": "makes the table of docs/transforms.md, which tests/docs/test_transforms.py compares with it",
    "replaces": "a column of the table of docs/transforms.md",
    "check_actions": "tests/spec/test_schedules.py runs it over every schedule: a new one must pass it before it ships",
    "run_step": "one whole step for a hand-written loop; the trainer starts a step and reads its results later",
    "MEASURED": "the order of the bytes that run/measured_steps.py holds",
    **dict.fromkeys(("loglikelihood", "loglikelihood_rolling", "generate_until"), "lm-evaluation-harness calls them"),
    "_render_traceback_": "IPython calls it",
    **dict.fromkeys(
        ("allgather", "alltoall_base", "getBackendName", "group_name"), "torch calls it of a process group"
    ),
    "ends_at": "a time limit that a scheduler sets; scripts of `launch` have it sent as a signal",
}
"""Names that somebody else uses, and who."""

KEYS_TO_COME = {"staleness", "strategy", "replan", "spares"}
"""Fields of config sections that are refused by name until they do something."""


def definitions(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
    for holder in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
        for node in holder.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def uses(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            yield node.id


@cache
def dead() -> dict[str, str]:
    """Name -> the file that defines it, for what nothing reads."""
    trees = {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in FILES}
    used = {name for tree in trees.values() for name in uses(tree)}
    return {
        name: file
        for file, tree in trees.items()
        for name in definitions(tree)
        if name not in used and not (name.startswith("__") and name.endswith("__"))
    }


def test_everything_is_used():
    excused = FOR_OTHERS.keys() | KEYS_TO_COME
    assert {name: file for name, file in dead().items() if name not in excused} == {}


def test_nothing_is_excused_that_is_used_or_gone():
    assert (FOR_OTHERS.keys() | KEYS_TO_COME) - dead().keys() == set()


def test_keys_to_come_are_fields_of_config_sections():
    assert {dead()[name] for name in KEYS_TO_COME} == {"spec/schema.py"}


def test_what_is_written_and_not_read_is_found():
    tree = ast.parse(
        "LIMIT = 1\nMOST: int = LIMIT\ndef one(): return two()\ndef two(): pass\nclass A:\n    field: int = 0\n"
    )
    assert set(definitions(tree)) - set(uses(tree)) == {"MOST", "one", "A", "field"}
