"""`shardwise plan` as a stranger types it: a table and files that train takes, answers to what-ifs, three lines for
mistakes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.plan import SEARCHING
from shardwise.config.load import load_config
from shardwise.errors import Exit

SMALL = ("plan", "llama3.2-1b", "--cluster", "2x2xh100", "--seq", "2k", "--batch", "256k")


@pytest.fixture
def said(run_here, capsys) -> Callable[..., str]:
    """What a command that must work prints."""

    def run(*words: str) -> str:
        capsys.readouterr()
        code = run_here(*words)
        output = capsys.readouterr()
        assert code == Exit.DONE, output.err
        return output.out

    return run


@pytest.fixture
def report(said) -> Callable[..., dict[str, Any]]:
    return lambda *words: json.loads(said(*words, "--json"))


@pytest.fixture
def refused(run_here, capsys) -> Callable[..., str]:
    def run(*words: str) -> str:
        capsys.readouterr()
        assert run_here(*words) == Exit.USER_MISTAKE
        error = capsys.readouterr().err
        lines = [line for line in error.splitlines() if line != SEARCHING]  # which is said on a busy machine
        assert [line[:7] for line in lines] == ["error: ", "  why  ", "  fix  "], error
        return error

    return run


def test_rows_are_ranked_and_each_is_a_file(report, workdir):
    found = report(*SMALL, "--tokens", "100B", "--price", "2")
    rows = found["rows"]
    assert found["schema"] == 1 and 1 < len(rows) <= 5
    times = [row["step_s"] for row in rows]
    assert times[0] <= 1.1 * min(times)  # a simpler layout may win by little
    assert max(times) == pytest.approx(times[-1], rel=0.1)
    for number, row in enumerate(rows, 1):
        assert row["file"] == f"plans/llama3.2-1b-2x2xh100/{number}.toml"
        config = load_config(workdir / row["file"]).config
        assert (config.parallel.dp, config.train.micro_batch) == (row["plan"]["dp"], row["micro_batch"])
        assert config.train.tokens == 100e9 and config.model.preset == "llama3.2-1b"
        assert row["memory_bytes"] <= found["memory_limit_bytes"]
        assert row["tokens_per_s"] == pytest.approx(2**18 / row["step_s"])
        assert row["cost"] == pytest.approx(2 * row["gpu_hours"]) and row["kwh"] > 0
        assert 0 < row["mfu"] < 1


def test_rows_of_another_question_stay(run_here, refused, workdir):
    ask = ("plan", "tiny", "--cluster", "2xh100", "--seq", "256", "--top", "1", "--json")
    for batch in ("4k", "8k", "4k"):
        assert run_here(*ask, "--batch", batch) == Exit.DONE
    first, second = (load_config(workdir / f"plans/tiny-1x2xh100{end}/1.toml").config for end in ("", "-2"))
    assert (first.train.global_batch_tokens, second.train.global_batch_tokens) == (4096, 8192)
    assert len(list(workdir.glob("plans/*"))) == 2
    said = refused(*ask, "--batch", "8k", "--out", "plans/tiny-1x2xh100")
    assert "another question" in said
    assert run_here(*ask, "--batch", "8k", "--out", "plans/tiny-1x2xh100", "--force") == Exit.DONE


def test_the_table_explains_the_winner(said):
    text = said(*SMALL, "--tokens", "100B", "--price", "2")
    for label in (
        "model",
        "cluster",
        "job",
        "search",
        "#1 step",
        "memory",
        "links",
        "training",
        "given",
        "wrote",
        "next",
    ):
        assert re.search(f"^{label} ", text, re.MULTILINE), label
    assert "compute" in text and "kWh" in text and "█" in text
    assert all(line == line.rstrip() and len(line) <= 120 for line in text.splitlines())


def test_seconds_and_bytes_add_up(report):
    for row in report(*SMALL)["rows"]:
        prediction = row["prediction"]
        assert sum(prediction["step"].values()) == pytest.approx(row["step_s"])
        assert sum(prediction["memory"].values()) == row["memory_bytes"]


def test_constraints_bind_every_row(report):
    rows = report(*SMALL, "parallel.tp=2", "memory.recompute=full")["rows"]
    assert rows and all(row["plan"]["tp"] == 2 and row["plan"]["recompute"] == "full" for row in rows)


def test_a_narrow_window_folds_and_cuts_nothing(said, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "72")
    text = re.sub(r"\x1b\[[0-9;]*m", "", said(*SMALL))
    tables = [line for line in text.splitlines() if "shardwise " not in line and "plans/" not in line]
    assert max(map(len, tables)) <= 72
    assert "…" not in text


def test_why_not_says_what_it_costs_and_why(report, said):
    found = report(*SMALL, "--why-not", "tp=2 zero=3")
    why, winner = found["why_not"], found["rows"][0]
    assert why["completed"]["plan"]["tp"] == 2 and why["completed"]["plan"]["zero"] == 3
    assert why["slower"] == pytest.approx(why["completed"]["step_s"] / winner["step_s"]) and why["slower"] > 1
    assert sum(one["seconds"] for one in why["differences"]) > 0
    text = said(*SMALL, "--why-not", "tp=2 zero=3")
    assert "why not  tp=2 zero=3: at best dp=2 zero=3" in text
    assert "slower than #1" in text or "times as long as #1" in text


def test_why_not_the_winner(said, report):
    winner = report(*SMALL)["rows"][0]["plan"]
    assert "that is #1" in said(*SMALL, "--why-not", winner["layout"])


def test_why_not_what_does_not_fit_says_by_how_much(report):
    big = ("plan", "llama3-8b", "--cluster", "2xh100", "--seq", "2k", "--batch", "32k")
    why = report(*big, "--why-not", "dp=2 zero=0 offload=none")["why_not"]
    assert why["fits"] is False and why["completed"]["memory_bytes"] > 80e9
    assert why["nearest"], "a changed word makes it fit"


def test_what_if_stands_beside_the_base(report, said):
    found = report(*SMALL, "--what-if", "nic=1GB/s", "--what-if", "gpus=2", "--what-if", "seq=4k")
    base, slow, fewer, longer = found["rows"][0], *found["what_if"]
    assert slow["step_s"] >= base["step_s"] and fewer["gpus"] <= 2
    assert longer["plan"]["global_batch"] * 4096 == 2**18
    assert "(as it is)" in said(*SMALL, "--what-if", "memory=20GB")


def test_inverse_questions(report):
    tokens = ("--tokens", "20B", "--price", "2")
    by_gpus = report(*SMALL, *tokens)["by_gpus"]
    assert report(*SMALL, "--fewest-gpus")["rows"][0]["gpus"] == min(map(int, by_gpus))
    middle = by_gpus["2"]
    within = report(*SMALL, *tokens, "--within", f"{middle['days'] * 1.001}d")["rows"]
    assert within[0]["gpus"] <= 2 and all(row["days"] <= middle["days"] * 1.001 for row in within)
    cheap = report(*SMALL, *tokens, "--budget", f"{middle['cost'] + 1:.0f}")["rows"]
    assert all(row["cost"] <= middle["cost"] + 1 for row in cheap)
    assert cheap[0]["step_s"] == min(row["step_s"] for row in cheap)


@pytest.mark.parametrize("framework", ["megatron", "deepspeed", "accelerate"])
def test_as_prints_that_frameworks_words_and_nothing_else(framework, said):
    text = said(*SMALL, "--as", framework)
    assert "not of this framework" in text and "tok/s" not in text and "row 1" in text
    if framework == "deepspeed":
        assert json.loads(text)["train_batch_size"] == 128


def test_as_says_what_the_frameworks_best_layout_costs(report, said, refused):
    """Row 1 has a schedule that Megatron-LM has not."""
    zero_bubble = ("parallel.pp=2", "parallel.schedule=interleaved")
    found = report(*SMALL, *zero_bubble, "--as", "megatron")
    assert (
        found["as"]["layout"] == found["rows"][0]["layout"] and found["as"]["slower"] == 1 and not found["as"]["lacks"]
    )
    asked = (*SMALL, "memory.recompute=none", "--as", "accelerate")
    found = report(*asked)
    made, row = found["as"], found["rows"][0]
    assert row["plan"]["zero"] == 1 and made["plan"]["zero"] != 1
    assert made["slower"] == made["step_s"] / row["step_s"] > 1 and "no zero=1" in made["lacks"][0]
    title = " ".join(line.removeprefix("#").strip() for line in said(*asked).splitlines())
    assert f"the best that accelerate runs, {100 * (made['slower'] - 1):.1f} % slower than row 1 row 1 is" in title
    assert f"row 1 is what accelerate does not run: {row['layout']}" in title and "accelerate has no zero=1" in title
    assert made["version"] in said(*asked)
    nothing = refused(*SMALL, "memory.recompute=selective", "--as", "deepspeed")
    assert "fits that DeepSpeed" in nothing and "whole blocks" in nothing
    other = refused("plan", "gpt2", "--cluster", "1xh100", "--as", "torchtitan")
    assert "would not train gpt2" in other and "--as megatron" in other


def test_a_hugging_face_directory_and_a_bare_config_json(report, workdir):
    sizes = {
        "hidden_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "intermediate_size": 1024,
        "vocab_size": 1000,
    }
    (workdir / "mine").mkdir()
    for file in (workdir / "mine" / "config.json", workdir / "other.json"):
        file.write_text(json.dumps({"model_type": "llama", **sizes}))
        found = report("plan", str(file), "--cluster", "2xh100", "--seq", "1k", "--batch", "32k")
        config = load_config(workdir / found["rows"][0]["file"]).config
        assert config.model.path or dict(config.model.overrides)["hidden"] == 512
    assert (workdir / "plans" / "mine-1x2xh100" / "1.toml").is_file()


def test_a_changed_row_is_not_overwritten(said, refused, workdir):
    said(*SMALL, "--out", "kept")
    file = workdir / "kept" / "1.toml"
    file.write_text(file.read_text() + "# a note\n")
    assert "kept/1.toml is not as" in refused(*SMALL, "--out", "kept")
    assert file.read_text().endswith("# a note\n")
    said(*SMALL, "--out", "kept", "--force")
    assert not file.read_text().endswith("# a note\n")


def test_a_row_of_a_small_cluster_is_taken_by_train(said, run_here, capsys, workdir: Path):
    (workdir / "text.txt").write_text("one two three four five six\n" * 2000)
    words = (
        "plan",
        "tiny",
        "--cluster",
        "2xcpu",
        "--seq",
        "64",
        "--batch",
        "512",
        "data.source=text.txt",
        "train.steps=2",
    )
    said(*words, "--top", "2")
    for file in sorted(workdir.glob("plans/*/*.toml")):
        assert run_here("train", str(file), "--dry-run") == Exit.DONE, capsys.readouterr().err
        layout = re.search(r"^# row \d of \d, question \w+: (.*) on", file.read_text(), re.MULTILINE)
        assert layout and f"plan     {layout[1]} fp32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (("lama3-8b", "--cluster", "8xh100"), "`llama3-8b`"),
        (("llama3-8b", "--cluster", "8xh1000"), "`h100`"),
        (("llama3-8b", "--cluster", "8xh100:nic=9PB/s"), "out of range"),
        (("llama3-8b",), "--cluster"),
        (("llama3-8b", "--cluster", "8xh100", "--batch", "100k"), "whole number of sequences"),
        (("llama3-8b", "--cluster", "8xh100", "parallel.tp=8", "parallel.pp=2"), "tp=8 pp=2 needs 16 GPUs"),
        (("llama3-8b", "--cluster", "8xh100", "parallel.tpp=8"), "unknown key"),
        (("llama3-8b", "--cluster", "8xh100", "--as", "megatrom"), "--as megatron"),
        (("llama3-8b", "--cluster", "8xh100", "--why-not", "tq=8"), "did you mean `tp`"),
        (("llama3-8b", "--cluster", "8xh100", "--what-if", "nick=5GB/s"), "`nic`"),
        (("llama3-8b", "--cluster", "8xh100", "--what-if", "nic=5"), "nic"),
        (("llama3-8b", "--cluster", "8xh100", "--within", "30d"), "needs --tokens"),
        (("llama3-8b", "--cluster", "8xh100", "--tokens", "1T", "--budget", "500k"), "needs --price"),
        (("llama3.2-1b", "--cluster", "h100", "--tokens", "15T", "--within", "1d"), "within 1 days"),
        (("llama3.2-1b", "--cluster", "h100", "--tokens", "15T", "--price", "2", "--budget", "10"), "for 10"),
        (("llama3-8b", "--cluster", "8xh100", "--top", "0"), "--top"),
    ],
)
def test_mistakes_get_three_lines(words, what, refused):
    assert what in refused("plan", *words)


def test_nothing_fits_says_the_closest_miss_and_what_would(refused):
    error = refused("plan", "llama3-8b", "--cluster", "h100", "--seq", "2k", "--batch", "16k", "memory.offload=none")
    assert "does not fit on 1x1xh100" in error and "too much" in error and "of 73.6 GiB" in error
    assert "without memory.offload=none" in error and "2 GPUs" in error and "adapter.kind=lora" in error


def test_a_config_json_with_a_missing_size_names_it(refused, workdir):
    (workdir / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}')
    assert "num_hidden_layers" in refused("plan", "config.json", "--cluster", "8xh100")
