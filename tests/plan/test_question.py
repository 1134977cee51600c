"""What `shardwise plan` is asked: words become a question, or three lines that say what is wrong with them."""

from __future__ import annotations

import json

import pytest

from shardwise.errors import UserError
from shardwise.plan.answer.named_model import read_model
from shardwise.plan.answer.question import ask


def test_units_and_constraints_are_read():
    question = ask("llama3-8b", "2x8xh100", seq="8k", batch="4M", tokens="1T", price="2.5", words=["parallel.tp=4"])
    assert (question.job.seq_len, question.job.global_batch, question.job.tokens) == (8192, 512, 10**12)
    assert dict(question.job.constraints) == {"parallel.tp": 4}
    assert question.price == 2.5 and question.name == "llama3-8b-2x8xh100"


def test_everything_not_typed_is_an_assumption_that_says_so():
    origins = {one.what: one.origin for one in ask("llama3-8b", "8xh100", seq="4k").assumptions}
    assert origins["tokens per sequence"] == "typed"
    assert origins["tokens per step"].startswith("assumed")
    assert "h100" in origins["memory bandwidth"]


def test_a_layout_string_is_a_set_of_constraints():
    question = ask("llama3-8b", "8xh100", words=["parallel.layout=tp=2 zero=3"])
    assert dict(question.job.constraints) == {"parallel.tp": 2, "parallel.zero": 3}


def test_a_schedule_alone_is_a_constraint_on_the_pipelines_that_the_search_may_choose():
    assert dict(ask("llama3-8b", "8xh100", words=["parallel.schedule=zbv"]).job.constraints) == {
        "parallel.schedule": "zbv"
    }


def test_old_cards_get_the_format_they_have():
    assert ask("gpt2", "8xv100-32").job.precision == "fp16"
    assert ask("gpt2", "cpu").job.precision == "fp32"


def test_a_config_json_is_a_model(tmp_path):
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "vocab_size": 300,
    }
    file = tmp_path / "small.json"
    file.write_text(json.dumps({"model_type": "llama", **sizes}))
    words, spec = read_model(str(file))
    assert (spec.name, spec.hidden, spec.num_layers) == ("small", 64, 2)
    assert "model.hidden=64" in words
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    assert read_model(str(tmp_path))[1] == read_model(str(tmp_path / "config.json"))[1]


@pytest.mark.parametrize(
    ("model", "cluster", "more", "said"),
    [
        ("lama3-8b", "8xh100", {}, "llama3-8b"),
        ("llama3-8b", "8xh10", {}, "h100"),
        ("llama3-8b", "8xh100:nic=50PB/s", {}, "out of range"),
        ("llama3-8b", "8xh100", {"seq": "8k", "batch": "100k"}, "not a whole number of sequences"),
        ("llama3-8b", "8xh100", {"seq": "many"}, "--seq"),
        ("llama3-8b", "8xh100", {"price": "cheap"}, "--price"),
        ("gpt2", "8xh100", {"seq": "8k"}, "learned positions"),
        ("gpt2", "8xv100-32", {"words": ["memory.precision=bf16"]}, "exclude each other"),
    ],
)
def test_mistakes_are_answered(model, cluster, more, said):
    with pytest.raises(UserError) as problem:
        ask(model, cluster, **more)
    assert said in str(problem.value) and problem.value.code == 2


@pytest.mark.parametrize(
    ("words", "both"),
    [
        (["parallel.dp=4", "parallel.tp=4"], ("dp=4 tp=4", "8xh100")),
        (["parallel.tp=7"], ("tp=7", "llama3-8b")),
        (["parallel.pp=5", "parallel.dp=2"], ("dp=2 pp=5", "8xh100")),
        (["parallel.ep=2"], ("ep=2", "llama3-8b")),
        (["parallel.zero=0", "parallel.dp=4", "parallel.replicate=2"], ("parallel.replicate = 2", "parallel.zero = 0")),
        (["parallel.layout=tp=2", "parallel.tp=4"], ("parallel.layout", "parallel.tp")),
        (["train.micro_batch=4", "parallel.dp=4"], ("train.micro_batch = 4", "share of the batch")),
        (["train.micro_batch=64"], ("train.micro_batch = 64", "global batch")),
        (["parallel.schedule=zbv", "parallel.virtual_stages=4"], ("zbv", "virtual_stages = 4")),
    ],
)
def test_contradictions_name_both_sides(words, both):
    with pytest.raises(UserError) as problem:
        ask("llama3-8b", "8xh100", seq="8k", batch="64k", words=words)
    assert all(side in problem.value.what for side in both), problem.value


@pytest.mark.parametrize(
    "words",
    [
        ["parallel.dp=4", "parallel.tp=4"],
        ["parallel.tp=7"],
        ["parallel.pp=64"],
        ["train.micro_batch=4", "parallel.dp=4"],
    ],
)
def test_a_fix_works_when_it_is_followed(words):
    with pytest.raises(UserError) as problem:
        ask("llama3-8b", "8xh100", seq="8k", batch="64k", words=words)
    fix = problem.value.fix.split(" or ")[0].split(",")[0]
    ask("llama3-8b", "8xh100", seq="8k", batch="64k", words=[*words, fix])


def test_a_config_json_without_a_size_names_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4}')
    with pytest.raises(UserError, match="num_hidden_layers"):
        read_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="model_type"):
        read_model(str(tmp_path / "config.json"))
