"""The arrows of docs/architecture.md, enforced: which room may import which, and where torch may not be loaded."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "shardwise"
FILES = sorted(PACKAGE.rglob("*.py"))
ROOMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py"))
FOR_ALL = {"errors", "files", "__version__"}
"""What stands beside the rooms, for anybody to use."""

NO_TORCH = (
    "cli/", "config/", "plan/", "explain/", "demo/__init__.py", "demo/perform.py", "cluster/describe/machine.py",
    "cluster/measure/devices.py", "cluster/measure/link.py", "spec/cluster.py", "cluster/describe/changes.py", "cluster/describe/toml.py", "cluster/describe/read.py", "cluster/describe/here.py", "cluster/describe/versions.py", "spec/model.py", "spec/presets.py", "interop/huggingface/config.py", "interop/huggingface/directory.py",
    "data/", "run/build.py", "run/rundir.py", "run/start.py", "run/weights.py", "run/guards.py", "run/clock.py", "run/events.py", "report/step_breakdown.py", "report/memory.py", "report/terminal.py", "launch/ranks.py",
    "launch/rank.py", "launch/local.py", "launch/allocator.py", "checkpoint/listing.py", "errors.py", "files.py", "__init__.py", "__main__.py",
)  # fmt: skip
MAY_IMPORT_TORCH = ("data/loader.py",)


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


@cache
def imports_of(file: Path) -> list[Import]:
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


def documented_arrows() -> dict[str, set[str]]:
    """Room -> rooms it may import, as the table of docs/architecture.md says."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| ([^|]*) \|$", page.split("## Rooms")[1].split("\n## ")[0], re.MULTILINE)
    named = {room: {word.strip() for word in text.split(",")} for room, text in rows}
    return {room: set(ROOMS) if "everything" in words else words - {"nothing"} for room, words in named.items()}


def test_the_table_has_every_room_and_no_other():
    arrows = documented_arrows()
    assert sorted(arrows) == ROOMS
    assert set().union(*arrows.values()) <= set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room):
    allowed = documented_arrows()[room] | FOR_ALL | {room}
    wrong = [
        f"{item.file} imports {item.module}"
        for file in FILES if file.parent.name == room
        for item in imports_of(file) if item.room is not None and item.room not in allowed
    ]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_table_promises_no_arrow_that_is_not_used(room):
    if room == "cli":  # "everything"
        return
    used = {item.room for file in FILES if file.parent.name == room for item in imports_of(file)}
    assert documented_arrows()[room] - used == set()


def test_config_needs_only_the_shapes_of_the_model_room():
    named = {
        item.module
        for file in FILES
        if file.parent.name == "config"
        for item in imports_of(file)
        if item.room == "model"
    }
    assert named == {"shardwise.spec.model"}


def test_run_and_launch_do_not_close_a_cycle_of_modules():
    """launch/local.py starts the worker and run/start.py calls launch/local.py: both only when a job starts."""
    late = {
        (item.file, item.module)
        for file in FILES for item in imports_of(file)
        if not item.at_start and item.module in ("shardwise.launch.local", "shardwise.run.worker")
    }  # fmt: skip
    assert ("run/start.py", "shardwise.launch.local") in late
    assert ("launch/local.py", "shardwise.run.worker") in late
    early = [
        item for file in FILES for item in imports_of(file) if item.at_start and item.module == "shardwise.launch.local"
    ]
    assert early == []


def test_torch_is_not_imported_where_answers_must_come_at_once():
    wrong = [
        f"{item.file} imports {item.module}"
        for file in FILES for item in imports_of(file)
        if item.at_start
        and item.module.split(".")[0] in ("torch", "safetensors")
        and item.file.startswith(NO_TORCH) and item.file not in MAY_IMPORT_TORCH
    ]  # fmt: skip
    assert wrong == []


def test_the_web_page_s_libraries_are_not_imported_by_anything_else():
    wrong = [
        f"{item.file} imports {item.module}"
        for file in FILES for item in imports_of(file)
        if item.module.split(".")[0] in ("starlette", "uvicorn") and not item.file.startswith("studio/")
    ]  # fmt: skip
    assert wrong == []


QUICK = ("--help", "--version", "explain", "explain zero", "train --help", "runs", "init made.toml")
HEAVY = ("torch", "numpy", "rich", "tokenizers", "safetensors", "transformers", "starlette", "uvicorn", "asyncio")


@pytest.mark.parametrize("words", QUICK)
def test_quick_answers_load_nothing_heavy(words, tmp_path):
    """What is loaded is checked, not how long it takes: that is the same on every machine."""
    program = (
        "import sys\nfrom shardwise.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', *[name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program, *words.split()], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "LOADED", done.stdout + done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "train parallel.cp=3 parallel.cp_kind=ulysses",
        "train parallel.tp=3",
        "train parallel.pp=7",
        "verify parallel.tp=3",
        "plan tiny --cluster 4xh100 --seq 128 --batch 1k --why-not tp=2 --what-if nodes=2",
        "plan tiny --cluster 4xh100 parallel.tp=3",
        "train --dry-run data.source=text.txt train.seq_len=32",
        "train --dry-run data.source=text.txt train.seq_len=32 parallel.dp=2 parallel.zero=3 parallel.pp=2",
    ],
)
def test_refusals_and_dry_runs_do_not_load_torch(words, tmp_path):
    (tmp_path / "text.txt").write_text("one two three four five six\n" * 200)
    program = (
        "import sys\nfrom shardwise.cli.main import main\nmain(sys.argv[1:])\nprint('LOADED', 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words.split()], cwd=tmp_path, capture_output=True, text=True, timeout=180
    )  # what is no longer refused would train for minutes
    assert done.stdout.splitlines()[-1] == "LOADED False", done.stdout + done.stderr
