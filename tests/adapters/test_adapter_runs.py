"""Adapter runs as a user meets them: what is saved, resuming, another base, export and merging, chat data, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import SMALL, losses_of
from safetensors import safe_open
from safetensors.torch import load_file

from shardwise.checkpoint.manifest import sealed
from shardwise.errors import Exit, UserError
from shardwise.run.weights import find_weights

LORA = ["adapter.rank=3", "adapter.targets=q,v,down", "adapter.train_also=norm", "adapter.dropout=0.1"]
CPU = torch.device("cpu")


def train(run_here, name: str, *words: object) -> Path:
    assert run_here("train", "--nproc", 1, *SMALL, *LORA, f"run.name={name}", *words) == Exit.DONE
    return Path("runs") / name


def names_in(file: Path) -> set[str]:
    with safe_open(file, framework="pt") as tensors:
        return set(tensors.keys())


def test_a_checkpoint_holds_only_what_is_trained(run_here):
    run = train(run_here, "small", "train.steps=2", "adapter.kind=lora")
    weights = names_in(run / "checkpoints" / "step-2" / "weights.safetensors")
    layers = ("attention.q", "attention.v", "feedforward.down")
    assert weights == {"norm.weight"} | {f"layers.{i}.{m}.lora_{x}" for i in (0, 1) for m in layers for x in "ab"}
    states = names_in(run / "checkpoints" / "step-2" / "optimizer.safetensors")
    assert {name.split("/", 1)[1] for name in states} == weights


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(run_here, kind: str):
    run = train(run_here, "run", "train.steps=6", f"adapter.kind={kind}", "checkpoint.every=3", "checkpoint.keep=9")
    straight = losses_of(run)
    assert run_here("resume", run, "--from", 3) == Exit.DONE
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("loss" in line and "event" not in line for line in lines) == 9  # steps 4-6 were really trained twice
    assert losses_of(run) == straight


def test_adapters_are_not_put_beside_another_base(run_here, capsys: pytest.CaptureFixture[str]):
    run = train(run_here, "moved", "train.steps=1", "adapter.kind=lora")
    file = run / "checkpoints" / "step-1" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["state"]["base"]["digest"] = "0" * 64
    file.write_text(sealed(manifest))
    with pytest.raises(UserError) as caught:
        find_weights(str(run))
    what, why, fix = str(caught.value).splitlines()
    assert "were trained beside other weights" in what and "drawn from a seed" in why and "model.path" in fix


@pytest.mark.parametrize("kind", ["lora", "qlora"])
def test_export_writes_adapters_or_the_merged_model(run_here, kind: str):
    assert run_here("train", "--nproc", 1, *SMALL, "train.steps=3", "run.name=base") == Exit.DONE
    assert run_here("export", "base", "--no-verify", "--out", "base-hf") == Exit.DONE
    words = ["model.path=base-hf", *SMALL[6:], *LORA, "train.steps=4", "optimizer.lr=0.02", f"adapter.kind={kind}"]
    assert run_here("train", "--nproc", 1, *words, "run.name=tuned") == Exit.DONE
    assert run_here("export", "tuned", "--out", "adapter") == Exit.DONE
    assert run_here("export", "tuned", "--merge-lora", "--no-verify", "--out", "merged") == Exit.DONE
    config = json.loads(Path("adapter/adapter_config.json").read_text())
    assert config["target_modules"] == ["down_proj", "q_proj", "v_proj"]
    assert config["modules_to_save"] == ["model.norm"] and config["base_model_name_or_path"] == "base-hf"
    assert len(load_file("adapter/adapter_model.safetensors")) == 13
    tokens_BT = torch.arange(12)[None]
    tuned, merged = (find_weights(name).load(CPU)(tokens_BT) for name in ("tuned", "merged"))
    torch.testing.assert_close(tuned, merged)
    assert not torch.allclose(merged, find_weights("base").load(CPU)(tokens_BT), atol=1e-3)
    # Started from: the first loss of the next run is the last one's, not the base's.
    more = [*words[:-1], f"adapter.kind={kind}", "adapter.path=adapter", "train.steps=1", "run.name=more"]
    more = [
        word for word in more if word.split("=")[0] not in ("adapter.rank", "adapter.targets", "adapter.train_also")
    ]
    assert run_here("train", "--nproc", 1, *more) == Exit.DONE
    config = Path("runs/more/config.toml").read_text()
    assert "rank = 3" in config
    assert run_here("generate", "tuned", "--prompt", "a", "--max-tokens", 3) == Exit.DONE
    assert run_here("eval", "tuned", "--batches", 1) == Exit.DONE


def test_adapters_are_merged_into_weights_that_fp8_has_not_rounded(run_here):
    """What a run in fp8 would have quantized is read again."""
    run = train(run_here, "small", "train.steps=2", "adapter.kind=lora", "memory.precision=fp32")
    before = find_weights(str(run)).load(CPU).state_dict()
    config = (run / "config.toml").read_text()
    assert config.count('precision = "fp32"') == 1
    (run / "config.toml").write_text(config.replace('precision = "fp32"', 'precision = "fp8"'))
    after = find_weights(str(run)).load(CPU).state_dict()
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_merging_needs_adapters(run_here):
    assert run_here("train", "--nproc", 1, *SMALL, "train.steps=1", "run.name=full") == Exit.DONE
    assert run_here("export", "full", "--merge-lora", "--out", "x") == Exit.USER_MISTAKE
    assert not Path("x").exists()


def test_adapters_learn_answers_only(run_here, workdir: Path):
    """Chat data: questions have no loss. The run counts the targets that its data has."""
    rows = [
        {"messages": [{"role": "user", "content": "q" * 9}, {"role": "assistant", "content": f"answer {i}"}]}
        for i in range(40)
    ]
    Path("chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("chat.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}\n{% endgeneration %}"
        "{% else %}Q:{{ m.content }}\n{% endif %}{% endfor %}"
    )
    words = ["data.source=chat.jsonl", "data.chat_template=chat.jinja", "adapter.kind=qlora", "train.steps=2"]
    run = train(run_here, "chat", *words)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "target_tokens" in line]
    assert len(steps) == 2
    assert all(0 < line["target_tokens"] < 0.6 * line["tokens"] for line in steps)


@pytest.mark.parametrize(
    "words, what",
    [
        (["adapter.kind=lora", "adapter.targets=qq"], "adapter.targets: `qq` matches no linear layer"),
        (["adapter.path=somewhere"], '`adapter.path = "somewhere"` does nothing'),
        (["adapter.kind=lora", "adapter.path=nowhere"], "no adapter in nowhere"),
        (["adapter.kind=lora", "adapter.dropout=1"], "adapter.dropout"),
    ],
)
def test_bad_settings_are_refused_before_a_run_exists(run_here, capsys, words: list[str], what: str):
    assert run_here("train", "--nproc", 1, *SMALL, *words) == Exit.USER_MISTAKE
    error = capsys.readouterr().err
    assert what in error and "\n  why  " in error and "\n  fix  " in error
    assert not Path("runs").exists() or not [d for d in Path("runs").iterdir() if not d.name.startswith(".")]
