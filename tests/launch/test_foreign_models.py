"""Models that only transformers can build, through the real commands: train in one layout, go on in another, evaluate,
sample, export."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import STORIES, losses_of, warm_command
from foreign_models import MODULES, write_model
from ranks import RankPool

from shardwise.errors import Exit

WORDS = [
    f"data.source={STORIES}", "train.seq_len=32", "train.global_batch=6", "train.micro_batch=2", "train.steps=4",
    "optimizer.lr=1e-3", "optimizer.schedule=constant", "optimizer.warmup=0", "memory.precision=fp64",
]  # fmt: skip


def last_line(run: Path, key: str) -> Any:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line[key] for line in reversed(lines) if key in line)


def test_a_run_changes_its_layout_and_goes_back_to_transformers(
    run_here: Callable[..., int], ranks: RankPool, workdir: Path
) -> None:
    """Two ranks with ZeRO 3, then one process; another run in one process has the same losses, to 1e-9."""
    write_model("opt", workdir / "opt")
    ranks.preload(*MODULES)
    done = warm_command(
        ranks,
        "train",
        "model.path=opt",
        *WORDS,
        "train.steps=3",
        "parallel.layout=dp=2 zero=3",
        "run.name=two",
        cwd=workdir,
    )
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    assert "proof    dp=2 zero=3: 3 steps in fp64, small model of this kind" in done.stdout
    assert "plan     dp=2 zero=3 fp64" in done.stdout and "model    opt, " in done.stdout
    assert last_line(workdir / "runs/two", "proof")["same"] is True
    two = workdir / "runs/two"
    assert run_here("resume", "two", "--allow", "train.steps", "train.steps=4", "parallel.layout=dp=1") == 0
    assert run_here("train", "model.path=opt", *WORDS, "--nproc", 1, "run.name=one") == 0
    for key in ("loss", "grad_norm"):
        found, right = losses_of(two, key), losses_of(workdir / "runs/one", key)
        assert [found[step] for step in range(1, 5)] == pytest.approx([right[step] for step in range(1, 5)], abs=1e-9)
    assert run_here("export", "two", "--out", "exported", "--dtype", "fp32") == 0
    assert _losses(workdir / "exported", workdir) == pytest.approx(last_line(two, "eval_loss"), abs=1e-5)
    assert run_here("generate", "two", "--prompt", "the", "--max-tokens", 5) == 0
    assert run_here("generate", "exported", "--prompt", "the", "--max-tokens", 5) == 0
    assert run_here("convert", "exported", "--to", "shardwise", "--out", "back") == 0
    assert run_here("eval", "back", f"data.source={STORIES}", "train.seq_len=32") == 0


def _losses(directory: Path, workdir: Path) -> float:
    """Held-out loss of a directory, by transformers alone, over the rows that `eval` takes."""
    from transformers import AutoModelForCausalLM

    from shardwise.config.load import load_config
    from shardwise.interop.huggingface.load_save import read_spec
    from shardwise.run.build import corpus_of

    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    rows = corpus_of(load_config(None, WORDS).config, read_spec(directory), progress=False).validation
    total, count = 0.0, 0
    for step in range(1, min(16, rows.num_sequences // 8) + 1):
        batch = rows.batch(step, range(8), 8)
        targets = torch.from_numpy(batch.targets)
        with torch.no_grad():
            logits = model(torch.from_numpy(batch.tokens)).logits
        total += float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
        count += batch.num_targets
    return total / count


@pytest.fixture
def refused(run_here: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(*words: object) -> str:
        code = run_here(*words)
        said = capsys.readouterr().err
        assert code == Exit.USER_MISTAKE and said.startswith("error: ") and said.count("\n") == 3, said
        assert not Path("runs").exists() or not [path for path in Path("runs").iterdir() if path.name != ".data"]
        return said

    return run


@pytest.fixture
def neox(workdir: Path) -> Path:
    return write_model("gpt_neox", workdir / "neox")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["parallel.tp=2"], "parallel.tp=1"),
        (["parallel.layout=dp=2 pp=2 schedule=zbv"], "parallel.pp=1 parallel.schedule=1f1b"),
        (["parallel.tp=2", "parallel.sequence=true", "--nproc", "2"], "parallel.tp=1 parallel.sequence=auto"),
    ],
    ids=["tp", "pp", "sp"],
)
def test_axes_that_cut_inside_are_refused_with_the_reason(
    refused: Callable[..., str], neox: Path, words: list[str], fix: str
) -> None:
    said = refused("train", "model.path=neox", *WORDS, *words)
    assert "gpt_neox cannot be cut over" in said and "dp, zero and replicate work" in said
    assert fix in said and "parallel.zero=3" in said


@pytest.mark.parametrize(
    ("kind", "words", "said"),
    [
        ("bloom", ["data.document_mask=true"], "data.packing=single"),
        ("gpt_neox", ["model.num_layers=2"], "transformers builds this model from its own config.json"),
    ],
)
def test_what_a_foreign_model_cannot_do_is_refused(
    refused: Callable[..., str], workdir: Path, kind: str, words: list[str], said: str
) -> None:
    write_model(kind, workdir / kind)
    assert said in refused("train", f"model.path={kind}", *WORDS, *words)


def test_a_layout_is_proven_on_a_small_model_of_the_same_architecture(ranks: RankPool, neox: Path) -> None:
    ranks.preload(*MODULES)
    words = ["model.path=neox", "parallel.layout=dp=2 zero=3", "--steps", 2, "--json"]
    done = warm_command(ranks, "verify", *words, cwd=neox.parent)
    assert done.returncode == Exit.DONE, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["same"] is True and found["proven"] == "dp=2 zero=3" and found["largest"] < 1e-11


def test_what_cannot_be_proven_beforehand_is_said(ranks: RankPool, workdir: Path, refused: Callable[..., str]) -> None:
    write_model("xglm", workdir / "xglm")
    said = refused("verify", "model.path=xglm", "--nproc", 2)
    assert "cannot be made smaller for a proof" in said and "repeats its first steps" in said
    words = [word for word in WORDS if "fp64" not in word]
    done = warm_command(ranks, "train", "model.path=xglm", *words, "parallel.layout=dp=2", "run.name=x", cwd=workdir)
    assert done.returncode == Exit.DONE, done.stdout
    assert "proof    dp=2: none before the first step, xglm cannot be made smaller" in done.stdout
    assert "proof    steps 1-3 repeated in one process" in done.stdout


def test_generate_says_when_no_cache_fits(
    run_here: Callable[..., int], workdir: Path, neox: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory, notes in ((neox, 0), (write_model("mamba", workdir / "mamba"), 1)):
        assert run_here("generate", directory, "--prompt", "the", "--max-tokens", 2) == 0
        assert capsys.readouterr().err.count("no key/value cache that works") == notes


def test_conversations_are_evaluated_apart(
    run_here: Callable[..., int], workdir: Path, neox: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In rows that they share, or in rows of their own where the architecture would let them see each other."""
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (workdir / "chat.jsonl").write_text((json.dumps({"messages": talk}) + "\n") * 40)
    for directory, notes in ((neox, 0), (write_model("mamba", workdir / "mamba"), 1)):
        words = ["data.source=chat.jsonl", "data.tokenizer=bytes", "train.seq_len=64", "data.validation_fraction=0.2"]
        assert run_here("eval", directory, *words) == 0
        assert capsys.readouterr().err.count("each conversation has a row of its own") == notes


def test_code_of_a_model_directory_is_never_run(refused: Callable[..., str], workdir: Path) -> None:
    folder = workdir / "model"
    folder.mkdir()
    (folder / "modeling.py").write_text("raise SystemExit('this must not run')\n")
    code = {"AutoConfig": "modeling.Config", "AutoModelForCausalLM": "modeling.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": "never-heard-of", "auto_map": code}))
    for words in (("train", "model.path=model"), ("generate", "model", "--prompt", "x")):
        said = refused(*words)
        assert "comes with code of its own" in said and "never run" in said


def test_native_code_is_used_where_there_is_some(run_here: Callable[..., int], neox: Path) -> None:
    config = json.loads((neox / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (neox / "config.json").write_text(json.dumps(config))
    (neox / "modeling.py").write_text("raise SystemExit('this must not run')\n")
    assert run_here("eval", "neox", f"data.source={STORIES}", "train.seq_len=32", "--batches", 1) == 0


def test_without_transformers_the_answer_is_how_to_get_it(
    refused: Callable[..., str], neox: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.auto.modeling_auto", None)
    said = refused("train", "model.path=neox", *WORDS)
    assert "transformers is not installed" in said and 'pip install "transformers' in said


def test_weights_that_are_not_the_models_are_refused(refused: Callable[..., str], neox: Path) -> None:
    config = json.loads((neox / "config.json").read_text())
    (neox / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    assert "missing tensors" in refused("generate", "neox", "--prompt", "x")
