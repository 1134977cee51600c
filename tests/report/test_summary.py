"""What is suggested at the end of a run is what somebody would type for its data."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from shardwise.config.load import load_config
from shardwise.report.summary import next_lines
from shardwise.run.rundir import RunDir


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
    lines = next_lines(RunDir(Path("runs/one")), load_config(None, words).config, 5, is_chat)
    assert shlex.split(lines[1]) == ["next", "shardwise", "generate", "runs/one", *typed]


@pytest.mark.parametrize("name", ["my first run", "5$", "it's", "été", "a&b"])
def test_a_name_is_one_word_of_what_is_typed_next(name):
    run = RunDir(Path("runs") / name)
    lines = next_lines(run, load_config(None, ["data.source=a.txt"]).config, 5, False)
    assert shlex.split(lines[1])[3] == f"runs/{name}"
    assert shlex.split(lines[2]) == ["shardwise", "eval", f"runs/{name}"]
    assert shlex.split(lines[3])[:3] == ["shardwise", "resume", f"runs/{name}"]


def test_a_run_goes_on_by_a_command_and_with_parts_of_a_program_by_that_program(tmp_path):
    run = RunDir(tmp_path)
    changed = run.how_to_resume("train.steps=40", allow=["train.steps"])
    assert changed == f"shardwise resume {tmp_path} --allow train.steps train.steps=40"
    run.own_parts.write_text('{"parts": ["loss", "data"]}')
    assert run.how_to_resume() == f'shardwise.load("{tmp_path}").resume(loss=..., data=...) in that program'
    assert run.how_to_resume("train.steps=40", allow=["train.steps"]).endswith(
        '.resume({"train.steps": 40}, loss=..., data=..., allow=["train.steps"]) in that program'
    )
