"""Explanations: complete, findable, honest about what is not built, and about code that exists."""

import json
import re
from pathlib import Path

import pytest

import shardwise
from shardwise.cli.main import main
from shardwise.config.keys import all_keys
from shardwise.config.write import is_built
from shardwise.demo import DEMOS
from shardwise.explain.pages import all_pages, find_page, render_page
from shardwise.spec.plan import Plan
from shardwise.spec.schedules import SCHEDULES, schedule_actions, stage_owners
from shardwise.spec.timeline import peak_in_flight, simulate

PACKAGE = Path(shardwise.__file__).parent
PROMISED = [
    "loss",
    "optimizer",
    "attention",
    "rope",
    "rehearsal",
    "weight-tying",
    "links",
    "nodes",
    "launch",
    "data-parallel",
    "zero",
    "tensor",
    "sequence",
    "context",
    "pipeline",
    "pipeline-schedules",
    "layout",
    "planner",
    "mesh",
    "verify",
    "experts",
    "recompute",
    "offload",
    "precision",
    "lora",
    "accumulation",
    "sum-rule",
    "collectives",
    "mfu",
    "memory",
    "batch-size",
    "schedule",
    "presets",
    "checkpoint",
    "packing",
    "seeds",
    "speed",
]


def test_promised_words():
    assert sorted(PROMISED) == list(all_pages())


@pytest.mark.parametrize("word", PROMISED)
def test_page_has_every_part_and_fits_on_a_screen(word, capsys):
    assert main(["explain", word]) == 0
    text = capsys.readouterr().out
    for label in ("splits", "sends", "saves", "best link", "config", "cost", "paper", "code"):
        assert re.search(rf"^{label} ", text, re.MULTILINE), label
    assert len(text.splitlines()) <= 40 or word == "presets"
    assert all(len(line) <= 120 for line in text.splitlines())


@pytest.mark.parametrize("word", PROMISED)
def test_page_names_real_keys_and_real_files(word):
    page = all_pages()[word]
    assert set(page.keys) <= set(all_keys())
    assert all((PACKAGE / path).is_file() for path in page.code), page.code


def test_a_technique_that_is_not_built_says_so():
    for page in all_pages().values():
        for name in page.keys:
            if all_keys()[name].later:
                assert "not available yet in this version" in render_page(page)


def test_a_technique_that_is_built_names_its_code():
    """Pages are written before their technique is; when its keys have come to work, so has the file that does it."""
    built = [
        page for page in all_pages().values() if page.keys and all(is_built(all_keys()[name]) for name in page.keys)
    ]
    assert {"zero", "tensor", "sequence", "pipeline", "precision"} <= {page.word for page in built}
    assert [page.word for page in built if not page.code] == []


def test_aliases_lead_to_one_page_each():
    names = [name for page in all_pages().values() for name in (page.word, *page.aliases)]
    assert len(names) == len(set(names))
    assert find_page("FSDP").word == "zero"
    assert find_page("Ring_All-Reduce").word == "collectives"
    assert find_page("hybrid").word == "zero"
    assert find_page("Zero Redundancy Optimizer").word == "zero"
    assert [find_page(key).word for key in ("parallel.zero", "optimizer.lr", "checkpoint.every")] == [
        "zero", "schedule", "checkpoint",
    ]  # fmt: skip
    assert {find_page(name).word for name in SCHEDULES} == {"pipeline-schedules"}


def test_words_in_several_parts(capsys):
    assert main(["explain", "ring", "all-reduce"]) == 0
    assert "2(N-1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, page",
    {
        "tensor parallelism": "tensor",
        "pipeline parallelism": "pipeline",
        "activation checkpointing": "recompute",
        "vocab parallel": "tensor",
        "kv cache": "attention",
        "weight tying": "weight-tying",
        "grouped-query attention": "attention",
        "load balancing": "experts",
        "world size": "mesh",
        "rope": "rope",
        "torchrun": "nodes",
        "dropout": "lora",
        "NVLink": "links",
        "gqa": "attention",
        "Adam": "optimizer",
        "perplexity": "loss",
        "loss spike": "loss",
        "lora vs qlora": "lora",
        "MLA": "attention",
    }.items(),
)
def test_a_word_of_the_field_opens_the_page_that_explains_it(words, page, capsys):
    """As people type them: several words without quotes, or with."""
    for typed in (words.split(), [words]):
        assert main(["explain", *typed]) == 0
        assert capsys.readouterr().out.startswith(f"{page}: ")


def test_list_of_words(capsys):
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {word} " in listed for word in PROMISED)


def test_zero_prints_the_paper_s_memory_table(capsys):
    main(["explain", "zero"])
    text = capsys.readouterr().out
    parameters, ranks = 7.5, 64
    for stage, figure in {
        "16P ": 16 * parameters,
        "4P + 12P/N": 4 * parameters + 12 * parameters / ranks,
        "2P + 14P/N": 2 * parameters + 14 * parameters / ranks,
        "16P/N": 16 * parameters / ranks,
    }.items():
        printed = re.search(rf"{re.escape(stage)} +([\d.]+) +GB", text)
        assert printed is not None, stage
        assert float(printed[1]) == pytest.approx(figure, abs=0.05)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_figures_of_a_schedule_are_those_of_its_list(schedule, capsys):
    """Idle share at 8 and 32 micro-batches on 4 ranks, and the activations of the fullest rank."""
    main(["explain", "pipeline-schedules"])
    row = re.search(rf"^ +{schedule} +(\d+) % +(\d+) % +([\d.]+) ", capsys.readouterr().out, re.MULTILINE)
    assert row is not None
    stages = SCHEDULES[schedule].usual_stages
    owners, seconds = stage_owners(schedule, 4, stages), {"F": 1, "I": 1, "W": 1, "B": 2}
    for microbatches, printed in ((8, row[1]), (32, row[2])):
        actions = schedule_actions(schedule, 4, stages, microbatches)
        idle = simulate(actions, owners, lambda action: seconds[action.kind]).bubble_fraction
        assert int(printed) == round(100 * idle)
    assert float(row[3]) == max(peak_in_flight(schedule_actions(schedule, 4, stages, 8))) / stages


def test_the_example_of_the_mesh_is_where_a_plan_puts_it(capsys):
    main(["explain", "mesh"])
    assert "Rank 5 of pp=2 dp=2 tp=2 stands at pp 1, dp 0, tp 1." in " ".join(capsys.readouterr().out.split())
    plan = Plan(
        device="cpu",
        precision="fp32",
        seq_len=16,
        global_batch=8,
        micro_batch=1,
        num_steps=1,
        threads_per_rank=1,
        reason="",
        dp=2,
        tp=2,
        pp=2,
        split=(1, 1),
    )
    at = plan.coordinates(5)
    assert (at.pp, at.dp, at.tp) == (1, 0, 1)


def test_a_page_mentions_its_demo():
    for word, page in all_pages().items():
        assert (f"shardwise explain {word} --demo" in " ".join(render_page(page).split())) == (word in DEMOS)


def test_presets_lists_them_with_their_sizes(capsys):
    assert main(["explain", "presets"]) == 0
    assert re.search(r"^ +llama3-8b +8\.0 B +32 +4096$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize("words", [[], ["zero"], ["presets"]])
def test_json(words, capsys):
    assert main(["explain", *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema"] == 1


def test_mistakes(capsys):
    assert main(["explain", "pipelin"]) == 2
    assert "fix  did you mean `shardwise explain pipeline`?" in capsys.readouterr().err
    assert main(["explain", "pipeline", "or", "tensor"]) == 2
    assert "did you mean `shardwise explain pipeline` or `shardwise explain tensor`?" in capsys.readouterr().err
    for word in ("lora", "seeds"):
        assert main(["explain", word, "--demo"]) == 2
        refusal = capsys.readouterr().err
        assert f"`--demo` is not available yet for `{word}`" in refusal
        assert all(demo in refusal for demo in DEMOS)
    assert main(["explain", "--demo"]) == 2
    assert "a demo needs a word" in capsys.readouterr().err
    assert main(["explain", "zero", "train.steps=3"]) == 2
    assert "cannot be used with" in capsys.readouterr().err
