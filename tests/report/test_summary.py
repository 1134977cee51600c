"""What is suggested at the end of a run is what somebody would type for its data."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.report.summary import next_lines


@pytest.mark.parametrize(
    ("words", "is_chat", "typed"),
    [
        ([], False, ["--prompt", "class "]),
        (["data.source=a.txt"], False, ["--prompt", "The "]),
        (["data.source=a.txt", "train.sample_prompt=Once upon"], False, ["--prompt", "Once upon"]),
        (["data.source=a.txt", "train.sample_prompt=5$"], False, ["--prompt", "5$"]),
        (["data.source=a.jsonl"], True, ["--chat", "--prompt", "Hello"]),
    ],
)
def test_the_prompt_fits_the_corpus(words, is_chat, typed):
    lines = next_lines(Path("runs/one"), load_config(None, words).config, 5, is_chat)
    assert shlex.split(lines[1]) == ["next", "shardwise", "generate", "runs/one", *typed]
