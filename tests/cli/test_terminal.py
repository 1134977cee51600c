"""What a terminal can show decides how output looks, never whether a command works."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest
from commands import SMALL

from shardwise.cli.main import main
from shardwise.errors import UserError
from shardwise.terminal import ASCII, COPIED, make_console, prepared, rows_of, say, styled

ENCODINGS = ("ascii", "latin-1", "utf-8")


class Terminal(io.TextIOWrapper):
    """A stream of one encoding, a terminal or not, and what was written to it."""

    def __init__(self, encoding: str, is_terminal: bool = False):
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict")
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def said(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode("utf-8" if self.encoding == "utf-8" else "latin-1")


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Terminal]:
    """Makes standard output and error a stream of an encoding."""

    def become(encoding: str, is_terminal: bool = False) -> Terminal:
        stream = Terminal(encoding, is_terminal)
        for name, value in {"TERM": "xterm-256color", "COLUMNS": "100"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    return become


@pytest.fixture(scope="module")
def odd_run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A finished run whose sample has letters of every kind, because its text has."""
    house = tmp_path_factory.mktemp("odd")
    (house / "odd.txt").write_text("été 中文 🎉 █ → … \0" * 400, encoding="utf-8")
    before = os.getcwd()
    os.chdir(house)
    try:
        words = [*SMALL, "data.source=odd.txt", "train.steps=3", "run.name=odd", "--nproc", "1", "--no-verify"]
        stream, real = Terminal("ascii"), (sys.stdout, sys.stderr)
        sys.stdout = sys.stderr = stream  # the whole run says everything in ASCII, its sample too
        try:
            assert main(["train", *words]) == 0, stream.said()
        finally:
            sys.stdout, sys.stderr = real
        assert "sample " in stream.said() and "finished" not in stream.said()
    finally:
        os.chdir(before)
    return str(house / "runs/odd")


@pytest.mark.parametrize("is_terminal", [False, True], ids=["file", "terminal"])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_verbs_that_draw_work_in_every_encoding(odd_run, encoding, is_terminal, on_terminal, monkeypatch):
    monkeypatch.chdir(os.path.dirname(os.path.dirname(odd_run)))
    stream = on_terminal(encoding, is_terminal)
    for words in (
        ["watch", odd_run, "--once"],
        ["train", *SMALL, "data.source=odd.txt", "--dry-run"],
        ["plan", "tiny", "--cluster", "1x2xh100", "--seq", "1k", "--batch", "64k", "--top", "1", "--force"],
        ["generate", odd_run, "--prompt", "中", "--max-tokens", "4"],
        ["explain", "pipeline"],
    ):
        assert main(words) == 0, stream.said()[-2000:]
    assert ("█" in stream.said()) == (encoding == "utf-8")
    if encoding == "ascii":
        assert stream.said().isascii()


def test_an_error_with_odd_letters_is_three_lines_in_ascii(on_terminal):
    stream = on_terminal("ascii")
    assert main(["train", "/tmp/中文.toml"]) == 2
    assert stream.said().startswith("error: ") and "\\u4e2d" in stream.said()
    assert stream.said().count("\n") == 3


def test_what_cannot_be_encoded_looks_like_it_in_ascii():
    stream: IO[str] = Terminal("ascii")
    real, sys.stdout = sys.stdout, stream
    try:
        with prepared():
            say("▁▄█ ━ → … ⟦x⟧ é")
        assert stream.errors == "strict"  # as it was
    finally:
        sys.stdout = real
    assert stream.said() == "_~# = -> ... [[x]] \\xe9\n"
    assert all(text.isascii() for text in ASCII.values())
    assert len(set("▁▂▃▄▅▆▇█")) == len({ASCII[bar] for bar in "▁▂▃▄▅▆▇█"})


def test_plain_is_ascii_without_colour_on_a_terminal_too(odd_run, on_terminal, monkeypatch):
    monkeypatch.chdir(os.path.dirname(os.path.dirname(odd_run)))
    stream = on_terminal("utf-8", is_terminal=True)
    for words in (["--plain", "watch", odd_run, "--once"], ["watch", odd_run, "--once", "--plain"]):
        assert main(words) == 0
    assert stream.said().isascii() and "\x1b" not in stream.said() and "loss     " in stream.said()
    assert os.environ["TERM"] == "xterm-256color" and "NO_COLOR" not in os.environ


def test_no_color_leaves_no_colour(odd_run, on_terminal, monkeypatch):
    stream = on_terminal("utf-8", is_terminal=True)
    assert main(["watch", odd_run, "--once"]) == 0
    assert main(["no-such-verb"]) == 2
    assert "\x1b[1;31m" in stream.said()  # the word error is red
    stream = on_terminal("utf-8", is_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["watch", odd_run, "--once"]) == 0
    assert main(["no-such-verb"]) == 2
    assert "error: " in stream.said().replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert not any(f"{code}m" in stream.said() for code in range(30, 48))


def test_a_long_line_breaks_between_words_and_hangs_behind_its_label():
    console = make_console(Terminal("utf-8", True), width=40, force_terminal=True)
    line = "speed    861 tok/s; compute-bound: 90 % in the model, 5 % waiting for other ranks"
    rows = [row.plain for row in rows_of(line, console)]
    assert max(map(len, rows)) <= 40 and all(row.startswith(" " * 9) for row in rows[1:])
    assert " ".join(" ".join(rows).split()) == " ".join(line.split())
    command = "next     shardwise resume runs/tiny-001 --allow train.steps train.steps=600"
    assert [row.plain for row in rows_of(command, console)] == [command]  # pasted, it is one command


@pytest.mark.parametrize(
    "line, label",
    [
        ("plan     dp=2 fp32", "plan"),
        ("measured 1.18 s per step", "measured"),
        ("#1 step  compute", "#1 step"),
        ("held out 20 sequences", "held out"),
        ("  why    it is so", "why"),
        ("  fix  do this", "fix"),
        ("         342 ms", ""),
        ("the runs of this directory", ""),
    ],
)
def test_labels_are_known(line, label):
    text, _, found = styled(line)
    assert found == label and text.plain == line


def test_labels_are_dim_values_bold_and_verdicts_coloured():
    styles = {styled(line)[0].plain[span.start : span.end]: str(span.style) for line in (
        "step     12 of 40", "SAME     every number", "STOPPED  step 3", "speed    1.18 s per step",
    ) for span in styled(line)[0].spans}  # fmt: skip
    assert styles["step"] == "dim" and styles["12"] == "bold" and styles["1.18 s"] == "bold"
    assert "green" in styles["SAME"] and "yellow" in styles["STOPPED"]


def test_the_place_of_a_mistake_is_not_broken_in_a_narrow_terminal():
    console = make_console(Terminal("utf-8", True), width=60, force_terminal=True)
    said = str(UserError("`optimizer.lr` must be a number, got `a  b`", why="w", fix="f", where="command line"))
    assert [row.plain for row in rows_of(said.splitlines()[0], console)] == [
        "error: `optimizer.lr` must be a number, got `a  b`", "       command line",
    ]  # fmt: skip


def test_what_a_model_wrote_is_not_styled():
    assert [str(span.style) for span in styled("sample   there were 3 of 7 s")[0].spans] == ["dim"]


@pytest.mark.parametrize("columns", [80, 120])
def test_no_line_of_these_verbs_is_wider_than_the_terminal(odd_run, on_terminal, monkeypatch, columns):
    """Else the terminal breaks it inside a word, or inside a picture."""
    for words in (["watch", odd_run, "--once"], ["explain", "zero"], ["explain"]):
        stream = on_terminal("utf-8", is_terminal=True)
        monkeypatch.setenv("COLUMNS", str(columns))
        assert main(words) == 0
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.said())
        lines = [line for line in plain.splitlines() if not line.startswith(COPIED)]
        assert [line for line in lines if len(line.rstrip()) > columns] == [], words


def test_runs_keep_their_layout_on_a_row_below_where_there_is_no_room(odd_run, on_terminal, monkeypatch):
    stream = on_terminal("utf-8", is_terminal=True)
    monkeypatch.setenv("COLUMNS", "72")
    assert main(["runs", str(Path(odd_run).parent)]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", stream.said()).splitlines()
    assert max(map(len, lines)) <= 72 and lines[3].strip() == "dp=1"
