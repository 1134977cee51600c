"""Every command that README.md, the tutorial and the pages on planning, launching, Python and data show is typed here,
in order, in one empty directory, in which the Python programs of the page lie under the names that it gives them.

Training is made short by words appended to the command: few steps of a very small model, in one process unless the
command says how it is split (the default run keeps its two). `make` lines are looked up in the Makefile; `make train`
then stands for the command its recipe runs. Commands and Python programs are warm processes; what is neither is typed
into a shell.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from blocks import EXIT, SHELLS, Command, commands_of, programs_of, shells_without_prompt
from commands import warm_command, warm_program

if TYPE_CHECKING:
    from ranks import RankPool

ROOT = Path(__file__).parents[2]
DOCUMENTS = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in ("tutorial", "planning", "launch", "python", "data", "rehearsal")),
)
TIMEOUT_S = 180

FEW = 12
"""Steps: a command that takes no more is typed with the steps it has, because later ones build on its checkpoints."""

SMALL_BATCH = ["train.seq_len=32", "train.global_batch=4", "train.eval_batches=1", "train.sample_tokens=8"]
SMALL_MODEL = ["model.num_layers=4", "model.hidden=32", "model.num_heads=4", "model.num_kv_heads=2"]
SMALL_MODEL += ["model.head_dim=8", "model.ffn=64"]  # four layers: enough for the stages of two ranks in a V


def shortened(command: str) -> str:
    """The same command, doing less of it. Words that come later win, so it is enough to append."""
    if command == "make train":
        # two processes, as the recipe would
        return f"shardwise train train.steps=3 {' '.join([*SMALL_BATCH, *SMALL_MODEL])}"
    extra: list[str] = []
    asked = re.search(r"train\.steps=(\d+)", command)
    is_short = asked is not None and int(asked[1]) <= FEW
    if re.match(r"shardwise train\b", command) and "--dry-run" not in command:
        extra = [*([] if is_short else ["train.steps=3"]), *SMALL_BATCH]
        if "parallel." not in command:
            extra += ["--nproc 1"]
        if "model.path=" not in command:  # a model directory has the size it has
            extra += SMALL_MODEL
        if "train.time_limit=" in command:  # over before the first step: how far it gets must not depend on the machine
            extra += ["train.time_limit=1ms"]
    elif re.match(r"shardwise resume\b", command) and asked and not is_short:
        extra = ["train.steps=5"]
    elif re.match(r"shardwise verify\b", command):
        extra = ["--steps 2"]
    elif re.match(r"shardwise generate\b", command):
        extra = ["--max-tokens 5"]
    elif re.match(r"shardwise export\b", command):  # tests/prove/test_exported.py has it proven
        extra = ["--no-verify"]
    before, comment = [*command.split("  #", 1), ""][:2]
    return " ".join([before, *extra]) + (f"  #{comment}" if comment else "")


def make_target(command: str) -> str | None:
    words = shlex.split(command, comments=True)
    return words[1] if words[0] == "make" and len(words) == 2 else None


def program_of(command: str, home: Path) -> Path | None:
    """The file with the Python program that a command starts, from a file or from standard input."""
    found = re.fullmatch(r"python3 (?:(\S+\.py)|- <<'(\w+)'\n(.*\n)\2)", command, re.DOTALL)
    if found is None:
        return None
    path = home / (found[1] or "stdin.py")
    if found[3]:
        path.write_text(found[3])
    return path


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """An environment in which `shardwise` and `python3` are the ones under test."""
    tools = tmp_path_factory.mktemp("bin")
    for name, arguments in {"shardwise": "-m shardwise", "python3": ""}.items():
        script = tools / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments} "$@"\n')
        script.chmod(0o755)
    return {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_command_of_the_document_works(document, environment, ranks, tmp_path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = commands_of(document)
    for name, program in programs_of(document).items():
        (tmp_path / name).write_text(program)
    assert len(commands) >= 5, f"only {len(commands)} commands were found in {document}"
    for command in commands:
        target = make_target(command.text)
        assert target is None or target in targets, f"{command.where}: the Makefile has no target `{target}`"
        if command.text == ". .venv/bin/activate":
            assert "VENV   := .venv" in (ROOT / "Makefile").read_text()
        elif target is None or target == "train":
            _type(command, tmp_path, environment, ranks)


def _type(command: Command, home: Path, environment: dict[str, str], ranks: RankPool) -> None:
    typed = shortened(command.text)
    if typed.startswith("shardwise "):
        done = warm_command(ranks, *shlex.split(typed, comments=True)[1:], cwd=home, timeout=TIMEOUT_S)
    elif program := program_of(typed, home):
        done = warm_program(ranks, program, cwd=home, timeout=TIMEOUT_S)
    else:
        done = subprocess.run(
            ["bash", "-c", typed],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    said = f"{command.where}: `{typed}` ended with {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert done.returncode == command.expected_exit, said
    assert "Traceback" not in done.stderr, said
    if command.is_same_everywhere:
        stale = command.stale(done.stdout + done.stderr)
        assert stale is None, f"{command.where}: no longer printed: {stale!r}; run `python tests/docs/blocks.py`"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_shell_blocks_mark_their_commands(document):
    assert shells_without_prompt(document) == [], f"{', '.join(SHELLS)} blocks need lines that start with `$ `"


def test_what_a_document_says_about_processes_is_kept():
    assert "--nproc 1" in shortened("shardwise train run.name=x train.steps=100")
    split = shortened('shardwise train train.steps=12 parallel.layout="dp=2 zero=3"')
    assert "--nproc" not in split and "train.steps=3" not in split
    assert shortened("shardwise train parallel.tp=3  # exit 2").endswith("  # exit 2")


def test_a_documented_command_that_fails_is_noticed(ranks, tmp_path):
    shown = ["false", "exit 75   # exit 75", "shardwise watch nothing", "shardwise watch nothing  # exit 2"]
    shown += ["python3 - <<'END'", "import shardwise", "shardwise.no_such_name", "END"]
    (tmp_path / "page.md").write_text(
        "\n".join(["```console", *(f"$ {line}" for line in shown[:5]), *shown[5:], "```\n"])
    )
    wrong, right, unknown, expected, program = commands_of(tmp_path / "page.md")
    with pytest.raises(AssertionError, match=r"page.md:2: `false` ended with 1"):
        _type(wrong, tmp_path, dict(os.environ), ranks)
    with pytest.raises(AssertionError, match=r"page.md:4: `shardwise watch nothing` ended with 2"):
        _type(unknown, tmp_path, dict(os.environ), ranks)
    with pytest.raises(AssertionError, match=r"(?s)page.md:6: .* ended with 1.*AttributeError"):
        _type(program, tmp_path, dict(os.environ), ranks)
    for command in (right, expected):
        _type(command, tmp_path, dict(os.environ), ranks)


def test_a_transcript_that_is_no_longer_printed_is_noticed():
    shown = ["search   9 layouts in 0.1 s: 2 too large", "1   dp=8", "peak     3 GiB"]
    plan = Command("shardwise plan x", "page.md:1", shown)
    assert plan.stale("search   9 layouts in 7.5 s: 2 too large\n\n1   dp=8  \nmemory   4\npeak     3 GiB\n") is None
    assert plan.stale("search   8 layouts in 0.1 s: 2 too large\n1   dp=8\npeak     3 GiB\n") == shown[0]
    assert plan.stale("search   9 layouts in 0.1 s: 2 too large\npeak     3 GiB\n1   dp=8\n") == shown[2]


def test_a_documented_command_is_one_that_needs_no_shell():
    """What starts with `shardwise` is not typed into a shell: pipes and the like would be taken for its arguments."""
    found = [command for document in DOCUMENTS for command in commands_of(document)]
    plain = [command for command in found if command.text.startswith("shardwise ")]
    assert plain
    for command in plain:
        assert not set("|&;<>$`*?~\n") & set(EXIT.sub("", command.text)), f"{command.where} needs a shell"


def test_commands_are_read_with_their_continuations(tmp_path):
    (tmp_path / "page.md").write_text(
        "```console\n$ a \\\n    b\noutput\n$ c <<'END'\nd\nEND\n```\n```text\n$ not this\n```\n"
    )
    assert [command.text for command in commands_of(tmp_path / "page.md")] == ["a b", "c <<'END'\nd\nEND"]
