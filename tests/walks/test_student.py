"""A student with a laptop: two cores, no GPU, an afternoon."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from commands import SMALL
from walking import ENCODINGS, Step, walk

if TYPE_CHECKING:
    from ranks import RankPool

TINY = " ".join([*(word for word in SMALL if not word.startswith("data.")), "data.source=mine.txt"])
ODD_TEXT = "Zoë said: 中文 🎉 █ → … naïve €5 — fin.\n" * 300

STEPS = [
    Step("", "start here:  shardwise train"),
    Step("--version", "shardwise 0."),
    Step("help train", "--dry-run"),
    Step("explain", "zero"),
    Step("explain tensor parallelism", "tensor"),
    Step("train TINY train.steps=4 run.name=first", "sample   ", starts_ranks=True),
    Step("runs", "finished"),
    Step("watch last", "finished, 4 of 4 steps, dp=2"),
    Step("watch first --once", "measured"),
    Step("generate last --prompt 'def ' --max-tokens 4", "def "),
    Step("eval last --batches 1", "nats per token"),
    Step("train TINY --nproc 1 run.name=gentle train.steps=3 optimizer.lr=5e-4", "run      runs/gentle"),
    Step("compare first gentle", "optimizer.lr"),
    Step("train TINY --nproc 1 run.name=long train.steps=9 train.time_limit=1ms", "shardwise resume runs/long", 75),
    Step("stop long", "runs/long is not running (stopped)"),
    Step("resume long", "STOPPED  step 0, by train.time_limit", 75),
    Step("resume long train.steps=3", "add --allow train.steps if you mean it", 2),
    Step("resume long --nproc 1 --allow train.time_limit train.time_limit=30m train.steps=3 --allow train.steps",
         "run      runs/long"),
    Step("train TINY --nproc 1 run.name=mine train.steps=2 train.sample_prompt=中", "sample   "),
    Step("train TINY --dry-run", "text between"),
    Step("data prepare mine.txt --out tokens", "next     shardwise train data.source=tokens"),
    Step("data show tokens --rendered --num 1", "carries loss"),
    Step("export mine --out mine-hf", "wrote    mine-hf: tiny"),
    Step("generate mine-hf --prompt 'Zoë' --max-tokens 3", "Zo"),
    Step("init my.toml model.num_layers=4", "shardwise train my.toml --dry-run"),
    Step("train my.toml --dry-run", "predicted: weights"),
    Step("explain activation-checkpointing", "recompute"),
    Step("train parallel.tp=3", "8 heads do not divide by 3", 2),
    Step("trian", "did you mean `shardwise train`?", 2),
    Step("completion bash", "complete -o default"),
]  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_student_looks_around(encoding: str, place: Path, ranks: RankPool):
    """The first run has two processes; in ASCII they are real ones under LC_ALL=C, which print a sample."""
    (place / "mine.txt").write_text(ODD_TEXT, encoding="utf-8")
    walk(STEPS, encoding, place, ranks, {"TINY": TINY})
