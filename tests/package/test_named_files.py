"""Files that docstrings and comments of the package send their readers to are there."""

from __future__ import annotations

import re

import pytest
from import_graph import FILES, PACKAGE

ROOT = PACKAGE.parents[1]
THERE = {
    path.relative_to(ROOT).as_posix() for room in ("src", "tests", "benchmarks") for path in (ROOT / room).rglob("*.py")
}
OF_OTHERS = {"version.py": "torch's", "pretrain_gpt.py": "Megatron-LM's"}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_a_file_that_is_named_is_there(file):
    named = re.findall(r"(?<![\w.*/-])((?:\w+/)*\w+\.py)\b", file.read_text(encoding="utf-8"))
    missing = {name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in THERE)}
    assert missing - OF_OTHERS.keys() == set()
