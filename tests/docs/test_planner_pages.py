"""Pages that the planner writes are what it says today, and the commands they name exist."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import misprints
import rules_of_thumb

from shardwise.cli.main import VERBS
from shardwise.demo import DEMOS


@pytest.mark.parametrize("made", [misprints, rules_of_thumb], ids=lambda made: made.PAGE.name)
def test_the_page_is_what_the_planner_says(made):
    assert made.PAGE.read_text(encoding="utf-8") == made.page(), f"run `python benchmarks/{made.__name__}.py`"


def test_the_commands_exist():
    commands = re.findall(r"^    shardwise (\w+) (\w+)( --demo)?$", misprints.PAGE.read_text(encoding="utf-8"), re.M)
    assert len(commands) == 5
    for verb, word, demo in commands:
        assert verb in VERBS
        assert not demo or word in DEMOS
