"""Trained weights that are trained on: with nothing but `model.path` and `data.source` they get better, never worse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import SMALL, STORIES

from shardwise.config.load import load_config
from shardwise.errors import Exit

QUICK = ["train.sample_tokens=0", "--no-verify", "--nproc", 1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that has learned the stories, as a Hugging Face directory."""
    from shardwise.cli.main import main

    directory = tmp_path_factory.mktemp("trained")
    words = [*SMALL, "train.steps=60", "optimizer.lr=1e-2", f"run.dir={directory}/runs", "run.name=first", *QUICK]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr("shardwise.run.block_times.BUDGET_S", 0.0)
        assert main(["train", *map(str, words)]) == Exit.DONE
        assert (
            main(["export", f"{directory}/runs/first", "--out", f"{directory}/hf", "--dtype", "fp32", "--no-verify"])
            == Exit.DONE
        )
    return directory / "hf"


def held_out(run_here: Callable[..., int], capsys: pytest.CaptureFixture[str], weights: object, source: Path) -> float:
    capsys.readouterr()
    assert run_here("eval", weights, f"data.source={source}", "--json") == Exit.DONE
    said = capsys.readouterr().out
    return json.loads(said[said.index("{") :])["loss"]


@pytest.fixture
def other_text(workdir: Path) -> Path:
    """Text that is like what the model has seen, and not the same."""
    rows = [json.loads(line)["text"] for line in STORIES.read_text().splitlines()]
    path = workdir / "other.jsonl"
    lines = [json.dumps({"text": text.replace("the", "every").replace("was", "is")}) for text in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_the_default_rates_lower_the_held_out_loss(trained, other_text, run_here, capsys, workdir):
    before = held_out(run_here, capsys, trained, other_text)
    for kind, rate, said in (("none", 2e-5, "going on with"), ("lora", 2e-4, "usual for lora adapters")):
        words = ["train.steps=40", "train.global_batch=8", "train.seq_len=64", f"run.name={kind}", *QUICK]
        assert (
            run_here("train", f"model.path={trained}", f"data.source={other_text}", f"adapter.kind={kind}", *words) == 0
        )
        output = capsys.readouterr().out
        assert f"lr       {rate:g} at its peak, " in output and said in output
        assert ("parameters are trained, " in output) == (kind == "lora")
        config = load_config(workdir / "runs" / kind / "config.toml").config
        assert config.optimizer.lr == rate
        assert held_out(run_here, capsys, f"runs/{kind}", other_text) < before


def test_a_run_goes_on_with_the_rate_it_began_with(trained, other_text, run_here, capsys, workdir):
    words = [f"model.path={trained}", f"data.source={other_text}", "train.global_batch=4", "train.seq_len=32"]
    assert run_here("train", *words, "train.steps=2", "run.name=short", *QUICK) == 0
    assert run_here("resume", "short", "train.steps=3", "--allow", "train.steps") == 0
    lines = (workdir / "runs/short/config.toml").read_text().splitlines()
    written = next(line for line in lines if line.startswith("lr ="))
    assert written.split()[2] == "2e-05" and "# auto: usual for going on with" in written


def test_the_share_that_is_trained_is_what_torch_counts():
    from shardwise.adapters.lora import adapt_whole
    from shardwise.interop.peft.targets import count_trained
    from shardwise.model.decoder import Decoder
    from shardwise.spec.presets import preset
    from shardwise.spec.schema import AdapterConfig

    spec = preset("tiny").with_overrides({"num_layers": 2, "hidden": 32, "ffn": 48})
    for adapter in (AdapterConfig(kind="lora", rank=4), AdapterConfig(kind="lora", rank=2, train_also=("*norm",))):
        model = Decoder(spec)
        adapt_whole(model, adapter, 0, "fp32")
        assert count_trained(spec, adapter) == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_model_that_knows_more_than_bytes_must_bring_its_tokenizer(trained, other_text, run_here, capsys, workdir):
    config = json.loads((trained / "config.json").read_text())
    (workdir / "words").mkdir()
    (workdir / "words/config.json").write_text(json.dumps({**config, "vocab_size": 32000}))
    command = ["train", "model.path=words", f"data.source={other_text}", "--dry-run"]
    assert run_here(*command) == Exit.USER_MISTAKE
    said = capsys.readouterr().err
    assert "words holds no tokenizer" in said and "32,000 token ids" in said and "data.tokenizer=bytes" in said
    assert run_here(*command, "data.tokenizer=bytes") == Exit.DONE
