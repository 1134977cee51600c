"""The arrows of docs/architecture.md, enforced: which room may import which, and where torch may not be loaded."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from import_graph import FILES, PACKAGE, ROOMS, ROOT, arrows, imports_of, reachable, room_of

FOR_ALL = {"errors", "files", "foreign_json", "private_names", "terminal", "__version__"}
"""What stands beside the rooms, for anybody to use."""

RUNTIME = ("model", "kernels", "adapters", "memory", "optim", "parallel", "run", "prove", "report")
"""What trains. It is told a plan, and does not import who makes plans."""

STILL_WRONG: set[tuple[str, str]] = set()
"""Arrows between rooms that are still to go."""

NO_TORCH = (
    "cli/", "config/", "plan/", "explain/", "spec/", "data/", "demo/__init__.py", "demo/perform.py",
    "cluster/describe/", "cluster/measure/devices.py", "cluster/measure/link.py",
    "interop/huggingface/architectures.py", "interop/huggingface/config.py", "interop/huggingface/directory.py",
    "run/build.py", "run/ranks.py", "run/session.py", "run/rundir.py", "run/weights.py",
    "run/guards.py", "run/clock.py", "run/events.py",
    "report/step_breakdown.py", "report/memory.py", "report/terminal.py",
    "launch/rank.py", "launch/start.py", "launch/verify.py", "launch/local.py", "launch/allocator.py",
    "launch/place.py", "launch/head_address.py", "launch/schedulers/", "launch/spec.py",
    "launch/planned_job.py", "launch/submit.py", "launch/follow.py", "launch/by_ssh.py", "launch/mistakes/",
    "checkpoint/listing.py", "errors.py", "files.py", "foreign_json.py", "private_names.py", "terminal.py",
    "__init__.py", "__main__.py",
)  # fmt: skip
"""Files and folders whose modules load without torch: answers come at once where only they are needed."""
MAY_IMPORT_TORCH = ("data/loader.py",)


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


def right_arrows() -> dict[str, frozenset[str]]:
    """Room -> rooms it imports, without the arrows that are still to go."""
    return {room: frozenset(one for one in named if (room, one) not in STILL_WRONG) for room, named in arrows().items()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_the_table_allows(room):
    allowed = documented_arrows()[room] | FOR_ALL | {room} | {target for one, target in STILL_WRONG if one == room}
    wrong = [
        f"{item.file} imports {item.module}"
        for file in FILES if room_of(file) == room
        for item in imports_of(file) if item.room is not None and item.room not in allowed
    ]  # fmt: skip
    assert wrong == []


@pytest.mark.parametrize("room", ROOMS)
def test_the_table_promises_no_arrow_that_is_not_used(room):
    if room == "cli" or STILL_WRONG:  # "everything"; or arrows that come when wrong ones go
        return
    assert documented_arrows()[room] - arrows()[room] == set()


def test_no_wrong_arrow_is_listed_that_has_gone():
    assert {(room, target) for room, target in STILL_WRONG if target not in arrows()[room]} == set()


def test_no_room_imports_one_that_imports_it():
    graph = right_arrows()
    assert {room: reachable(room, graph) for room in ROOMS if room in reachable(room, graph)} == {}


def test_a_cycle_is_found():
    graph = {"run": frozenset({"report"}), "report": frozenset({"launch"}), "launch": frozenset({"run"})}
    assert reachable("run", graph) == {"run", "report", "launch"}


@pytest.mark.parametrize("room", RUNTIME)
def test_the_runtime_does_not_import_the_planner(room):
    """Both import `spec`: a contract between them is written there."""
    assert "plan" not in reachable(room, right_arrows())


@pytest.mark.parametrize("room, lower", [("spec", set()), ("config", {"spec"})])
def test_what_all_others_build_on_imports_nothing_above_it(room, lower):
    assert right_arrows()[room] <= lower


def test_paths_of_files_without_torch_exist():
    assert [name for name in (*NO_TORCH, *MAY_IMPORT_TORCH) if not (PACKAGE / name).exists()] == []


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
