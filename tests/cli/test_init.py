"""`shardwise init` writes a file that `train` takes, and never overwrites one by accident."""

from pathlib import Path

import pytest

from shardwise.cli.main import main
from shardwise.config.load import load_config
from shardwise.spec.schema import Config


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_writes_the_defaults():
    assert main(["init"]) == 0
    assert load_config("shardwise.toml").config == Config()


@pytest.mark.parametrize(
    "words",
    [
        ["train.steps=7", "model.num_layers=3", "memory.limit=6GiB", "run.name=abc"],
        ["model.path=some/dir", "comm.timeout=90s", "parallel.dp=2"],
        ["train.clip=none", "data.source=a,b"],
        ["parallel.layout=dp=2"],
    ],
)
def test_settings_are_already_in_the_file(words):
    assert main(["init", "mine.toml", *words]) == 0
    assert load_config("mine.toml").config == load_config(None, words).config


def test_does_not_overwrite(capsys):
    Path("mine.toml").write_text("precious")
    assert main(["init", "mine.toml"]) == 2
    assert "mine.toml already exists" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == "precious"
    assert main(["init", "mine.toml", "--force"]) == 0
    assert load_config("mine.toml").config == Config()


def test_refuses_a_directory_and_a_wrong_setting(capsys):
    Path("folder").mkdir()
    assert main(["init", "folder"]) == 2
    assert main(["init", "train.stpes=3"]) == 2
    assert "did you mean `steps`?" in capsys.readouterr().err
    assert not Path("shardwise.toml").exists()
