"""`shardwise init` writes a file that `train` takes, and never overwrites one by accident."""

import tomllib
from pathlib import Path

import pytest
from commands import STORIES

from shardwise.cli.init import recipes
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


def test_only_what_was_asked_for_is_written():
    assert main(["init", "mine.toml", "train.steps=7", "model.num_layers=3", "memory.limit=6GiB"]) == 0
    document = tomllib.loads(Path("mine.toml").read_text())
    assert document == {"model": {"num_layers": 3}, "train": {"steps": 7}, "memory": {"limit": "6GiB"}}
    assert main(["init", "all.toml", "--all", "train.steps=7"]) == 0
    assert len(Path("all.toml").read_text()) > 10 * len(Path("mine.toml").read_text())
    assert load_config("all.toml").config == load_config(None, ["train.steps=7"]).config


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_writes_its_keys_and_what_is_typed_wins(name, capsys):
    words = recipes()[name]["words"]
    assert main(["init", "mine.toml", "--recipe", name]) == 0
    assert load_config("mine.toml").config == load_config(None, words).config
    document = tomllib.loads(Path("mine.toml").read_text())
    assert sorted(f"{s}.{key}" for s, table in document.items() for key in table) == sorted(
        word.partition("=")[0] for word in words
    )
    assert main(["init", "other.toml", "--recipe", name, "train.steps=7", "model.preset=tiny", "optimizer.lr=0.5"]) == 0
    config = load_config("other.toml").config
    assert (config.train.steps, config.train.tokens, config.train.epochs) == (7, None, None)
    assert (config.model.preset, config.model.path, config.optimizer.lr) == ("tiny", None, 0.5)


def test_a_recipe_is_planned(run_here, capsys):
    """The one that needs neither weights nor text of its own."""
    assert main(["init", "mine.toml", "--recipe", "moe", f"data.source={STORIES}"]) == 0
    assert run_here("train", "mine.toml", "--dry-run", "--nproc", 1) == 0
    assert "tiny-moe" in capsys.readouterr().out


def test_an_unknown_recipe_is_answered_with_those_there_are(capsys):
    assert main(["init", "--recipe", "pretain"]) == 2
    said = capsys.readouterr().err
    assert all(name in said for name in recipes()) and "--recipe pretrain" in said
    assert not Path("shardwise.toml").exists()


def test_out_is_the_path_as_other_commands_spell_it(capsys):
    assert main(["init", "--out", "mine.toml", "train.steps=3"]) == 0
    assert load_config("mine.toml").config.train.steps == 3
    assert main(["init", "a.toml", "--out", "b.toml"]) == 2 and not Path("b.toml").exists()


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
