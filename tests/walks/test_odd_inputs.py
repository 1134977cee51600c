"""What a person may type by mistake, and what is in a file that should not be: each has the answer that odd_inputs.txt
says, in one process and one directory, which is left as it was."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import odd_files
import pytest
from said import check_plain, type_in


class OddInput(NamedTuple):
    """A command line, the exit code, and parts of its answer."""

    words: str
    code: int
    parts: list[str]


def read_table(text: str) -> list[OddInput]:
    """`$ command`, and below it the exit code and parts of the answer, with ` ... ` for what stands between them."""
    found = re.findall(r"^\$ (.*)\n(\d+) (.*)$", text, re.MULTILINE)
    return [OddInput(words, int(code), parts.split(" ... ")) for words, code, parts in found]


TABLE = (Path(__file__).parent / "odd_inputs.txt").read_text(encoding="utf-8")
ODD = read_table(TABLE)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The directory of odd_files.py; the machine has no GPU and no colour."""
    before = os.getcwd()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr("shardwise.run.block_times.BUDGET_S", 0.0)
        patch.setenv("COLUMNS", "400")
        patch.setenv("RAYON_NUM_THREADS", "1")  # --workers sets it for its process, which is this one
        yield odd_files.make(tmp_path_factory.mktemp("odd"))
        os.chdir(before)


def test_the_table_is_read_whole():
    assert TABLE.count("\n$ ") == len(ODD) >= 200
    assert len({odd.words for odd in ODD}) == len(ODD), "an input is there twice"


@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.words)
def test_an_odd_input_has_its_answer(odd: OddInput, place: Path):
    before = set(place.rglob("*"))
    code, out, err = type_in(shlex.split(odd.words))
    left = {path for path in place.rglob("*") if ".data" not in path.parts} - before  # text that was prepared is kept
    said = out + err
    assert code == odd.code, said
    assert all(part in said for part in odd.parts), f"{odd.parts} in:\n{said}"
    check_plain(said, err, code)
    for path in left:  # what a dry run prepares, or a plan's rows
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    assert code == 0 or not left, f"a refused command has left {sorted(map(str, left))}"
