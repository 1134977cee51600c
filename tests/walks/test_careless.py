"""Someone whose letters are odd, whose files are damaged and whose fingers slip: work goes on, or three lines say why
not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import odd_files
import pytest
from walking import ENCODINGS, Step, walk

if TYPE_CHECKING:
    from ranks import RankPool

TRAIN = "train small.toml --nproc 1 --no-verify"

STEPS = [
    Step("train smal.toml", "did you mean small.toml?", 2),
    Step("TRAIN train.steps=4 checkpoint.every=2 run.name=été", "run      runs/"),
    Step("watch last --once", "finished, 4 of 4 steps"),
    Step("generate été --prompt x --max-tokens 3 --json", '"prompt": "x"'),
    Step("export été --out '中文 model'", "wrote    "),
    Step("eval '中文 model' data.source=stories.jsonl", "perplexity"),
    Step("train 'model.path=中文 model' data.source=stories.jsonl train.seq_len=32 --dry-run", "llama"),
    Step("train small.toml run.name=中/文", "cannot name a directory", 2),
    Step("train small.toml data.source=中文.txt", "no such data: ", 2),
    Step("train small.toml train.stepś=3", "unknown key", 2),
    Step("trän", "did you mean `shardwise train`?", 2),
    Step("explain 中文", "nothing is written about", 2),
    Step("train toml/nan.toml", "toml/nan.toml:2", 2),
    Step("train small.toml data.source=data/cut.jsonl", "data/cut.jsonl:2", 2),
    Step("train small.toml data.source=data/binary.txt --dry-run", "NUL bytes, which were dropped"),
    Step("train small.toml data.source=data/latin.txt --dry-run", "sample   the first sequence"),
    Step("train model.path=model/words data.source=stories.jsonl", "hidden_size = '32' is no size", 2),
    Step("generate weights/zeros --prompt x", "cannot read the weights in weights/zeros", 2),
    Step("eval broken/weights", "weights.safetensors is damaged", 2),
    Step("runs broken", "finished"),
    Step("watch broken/metrics --once", "it ended without a last word"),
    Step("TRAIN run.name=good", "is already in use", 2),
    Step("TRAIN run.name=mad optimizer.lr=1e30 optimizer.name=sgd train.steps=9 train.clip=0", "not a number", 4),
    Step("resume mad", "mad", 4),
    Step("stop nobody", "no run `nobody`", 2),
]  # fmt: skip
SPOILED = [
    Step("eval été", "it has 9 bytes of", 2),
    Step("resume été --nproc 1 --allow train.steps train.steps=5", "passing over step-4"),
    Step("watch été --once", "finished, 5 of 5 steps"),
]
"""Once the newest checkpoint is cut short."""


@pytest.fixture(scope="module")
def odd_place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    before = os.getcwd()
    place = odd_files.make(tmp_path_factory.mktemp("careless"))
    os.chdir(before)
    return place


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_careless_person_is_told(encoding: str, place: Path, odd_place: Path, ranks: RankPool):
    shutil.copytree(odd_place, place, symlinks=True, dirs_exist_ok=True)
    walk(STEPS, encoding, place, ranks, {"TRAIN": TRAIN})
    os.truncate("runs/été/checkpoints/step-4/weights.safetensors", 9)
    walk(SPOILED, encoding, place, ranks, {})
