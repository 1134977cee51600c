"""`--lr 3` is answered with the key that is meant, and options that a verb has are left alone."""

from __future__ import annotations

import pytest

from shardwise.cli.main import main


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("train --lr 3", "write `optimizer.lr=3`"),
        ("train --steps 20", "write `train.steps=20`"),
        ("train --lr=0.1 x.toml", "write `optimizer.lr=0.1`"),
        ("resume last --optimizer.lr 3", "write `optimizer.lr=3`"),
        ("train --epochs", "write `train.epochs=VALUE`"),
        ("train --per_device_train_batch_size 3", "write `train.micro_batch=3`"),
        ("train --gradient-checkpointing", "set `memory.recompute` instead"),
        ("runs --lr 3", "leave it out"),
        ("generate last --prompt-file x", "did you mean `--prompt`?"),
        ("train --config x.toml train.steps=3", "`shardwise train x.toml`"),
        ("train -c=x.toml", "`shardwise train x.toml`"),
        ("verify --config", "`shardwise verify FILE`"),
        ("train --set train.steps=3", "leave out `--set`"),
        ("train optimizer.lr 1e-3", "write `optimizer.lr=1e-3`"),
        ("train optimizer.lr = 1e-3", "write `optimizer.lr=1e-3`"),
        ("train optimizer.lr =1e-3", "write `optimizer.lr=1e-3`"),
        ("train optimizer.lr:1e-3", "write `optimizer.lr=1e-3`"),
        ("train optimizer.lr --dry-run", "write `optimizer.lr=VALUE`"),
        ("resume last train.steps+=10", "write `train.steps=VALUE`"),
        ("train --bogus 3", "`shardwise train --help` lists every option"),
    ],
)
def test_an_option_that_is_a_key(words, hint, capsys):
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert hint in error and len(error.splitlines()) == 3


@pytest.mark.parametrize("words", ["data prepare nowhere.txt --out x --text-field lr", "train --clus lr"])
def test_an_option_of_the_verb_and_its_value_are_none(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words.split()) == 2
    assert "is no option" not in capsys.readouterr().err
