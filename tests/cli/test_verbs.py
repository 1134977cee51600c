"""Each verb's normal use, on one tiny run (and a second to compare it with) that this module trains once."""

from __future__ import annotations

import io
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from commands import SMALL, losses_of

from shardwise.cli.main import VERBS, main
from shardwise.errors import Exit
from shardwise.run.rundir import RunDir
from shardwise.run.weights import find_weights


@pytest.fixture(scope="module")
def house(tmp_path_factory) -> Path:
    """A directory with runs/first, runs/second (another seed) and runs/diverged."""
    root = tmp_path_factory.mktemp("house")
    words = ["train", "--nproc", "1", *SMALL, f"run.dir={root / 'runs'}", "checkpoint.every=2"]
    assert main([*words, "run.name=first", "train.steps=4"]) == Exit.DONE
    assert main([*words, "run.name=second", "train.steps=4", "train.seed=1"]) == Exit.DONE
    wild = ["optimizer.lr=1e9", "optimizer.schedule=constant", "optimizer.warmup=0", "train.clip=0"]
    assert main([*words, "run.name=diverged", "train.steps=4", *wild]) == Exit.DIVERGED
    return root


@pytest.fixture
def said(house, monkeypatch, capsys) -> Callable[..., str]:
    """Run a verb in the house; returns what it printed."""
    monkeypatch.chdir(house)

    def run(*words: object, code: Exit = Exit.DONE) -> str:
        capsys.readouterr()
        found = main([str(word) for word in words])
        output = capsys.readouterr()
        assert found == code, output
        return output.out

    return run


@pytest.fixture
def reported(said) -> Callable[..., dict[str, Any]]:
    """The same with --json: strict JSON with the schema number, and nothing else on stdout."""

    def run(*words: object) -> dict[str, Any]:
        report = json.loads(said(*words, "--json"), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
        assert report["schema"] == 1
        return report

    return run


def test_runs_lists_them(said, reported):
    lines = said("runs").splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["first", "finished", "4/4"], ["second", "finished", "4/4"]]
    by_name = {run["name"]: run for run in reported("runs")["runs"]}
    assert by_name["first"]["loss"] == pytest.approx(losses_of(Path("runs/first"))[4])
    assert by_name["diverged"]["state"] == "failed" and by_name["diverged"]["loss"] is None
    Path("empty").mkdir()
    assert "no runs in empty" in said("runs", "empty")
    assert reported("runs", "empty")["runs"] == []
    assert main(["runs", "nowhere"]) == Exit.USER_MISTAKE


def test_watch_shows_a_run_that_has_ended(said, reported):
    assert "runs/first: finished, 4 of 4 steps, dp=1" in said("watch", "first")
    assert reported("watch", "first")["event"]["event"] == "finished"
    assert "not a number" in said("watch", "diverged")
    assert reported("watch", "diverged")["last"]["loss"] is None


def test_metrics_are_json_for_every_reader(house):
    for line in (house / "runs/diverged/metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert math.isnan(RunDir(house / "runs/diverged").steps()[2]["loss"])


def test_compare_sets_two_runs_side_by_side(said, reported):
    assert "train.seed" in said("compare", "first", "second")
    assert reported("compare", "first", "second")["settings"] == {"train.seed": [0, 1]}
    assert "equal to the last digit over 4 steps" in said("compare", "first", "runs/first")
    assert reported("compare", "first", "diverged")["losses"]["first_different_step"] is not None


def test_compare_of_many_judges_each_against_the_first(said, reported):
    text = said("compare", "first", "runs/first", "diverged")
    assert "same     first against first" in text and "worse    diverged against first" in text
    report = reported("compare", "first", "second", "diverged")
    assert report["settings"]["optimizer.lr"] == [1e-3, 1e-3, 1e9]
    assert [one.get("verdict") for one in report["runs"]] == [None, "same", "worse"], "another seed is the A/A band"
    assert report["band"]["runs"] == ["first", "second"] and report["band"]["width"] > 0
    assert main(["compare", "first"]) == Exit.USER_MISTAKE


def test_runs_can_be_sorted(reported):
    def names(*words: str) -> list[str]:
        found = [run["name"] for run in reported("runs", *words)["runs"]]
        return [name for name in found if name in ("first", "second", "diverged")]

    held = {run["name"]: run for run in reported("runs")["runs"]}
    best = min(("first", "second"), key=lambda name: held[name]["held_out_loss"])
    assert names() == ["first", "second", "diverged"] == [*names("--sort", "name")[1:], "diverged"]
    assert names("--sort", "held-out")[0] == best and names("--sort", "loss")[-1] == "diverged"
    assert names("--sort", "date", "--reverse") == ["diverged", "second", "first"]


def test_compare_prints_settings_as_they_are_typed(said, reported, tmp_path):
    for name, text in {
        "small": "[model]\nnum_layers = 2\nffn = 64\n[optimizer]\nbetas = [0.9, 0.99]\n",
        "large": '[model]\nnum_layers = 4\n[train]\nsteps = 7\n[data]\nsource = ["a.txt", "b.txt"]\n',
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").write_text(text)
    pair = tmp_path / "small", tmp_path / "large"
    lines = [line.split(maxsplit=1) for line in said("compare", *pair).splitlines()[1:]]
    shown = {key: values.strip().split("  ") for key, values in lines[:5]}
    assert {key: [values[0], values[-1].strip()] for key, values in shown.items()} == {
        "data.source": ['"python"', '["a.txt", "b.txt"]'],
        "train.steps": ["-", "7"],
        "optimizer.betas": ["[0.9, 0.99]", "[0.9, 0.95]"],
        "model.ffn": ["64", "-"],
        "model.num_layers": ["2", "4"],
    }
    settings = reported("compare", *pair)["settings"]
    assert settings["model.num_layers"] == [2, 4] and settings["model.ffn"] == [64, None]


def test_stop_of_a_finished_run_changes_nothing(said, house):
    assert "is not running (finished)" in said("stop", "first")
    assert not (house / "runs/first/stop").exists()


def test_resume_of_a_finished_run_says_how_to_go_on(said):
    assert "has finished its 4 steps" in said("resume", "first")


def test_resume_of_a_run_measured_in_tokens_says_how_to_go_on(said):
    words = [*SMALL, "run.name=counted", "train.tokens=512", "--nproc", 1]
    assert "--allow train.tokens train.tokens=1024" in said("train", *words)
    command = said("resume", "counted").split("next     shardwise ")[1].split()
    assert "resume   from step 2 of 4, runs/counted/checkpoints/step-2" in said(*command)
    assert max(losses_of(Path("runs/counted"))) == 4
    assert "resume   from the beginning, as asked" in said(*command, "--from", 0)


def test_train_resume_auto_is_one_line_for_any_state(said):
    words = ["train", *SMALL, "train.steps=2", "run.name=auto", "--nproc", 1, "--resume", "auto"]
    said(*words)
    assert "is finished; nothing to do" in said(*words)


def test_a_run_of_one_step(said, house):
    said("train", *SMALL, "train.steps=1", "run.name=single", "--nproc", 1)
    assert RunDir(house / "runs/single").last_event()["event"] == "finished"


def test_generate_continues_a_prompt(said, reported, monkeypatch):
    words = ["--max-tokens", 5, "--temperature", 0]
    text = said("generate", "first", "--prompt", "Where is", *words)
    assert text.startswith("Where is") and len(text) > len("Where is\n")
    report = reported("generate", "first", "--prompt", "Where is", *words)
    assert report["prompt"] + report["completion"] + "\n" == text
    assert said("generate", "runs/first/checkpoints/step-4", "--prompt", "Where is", *words) == text
    monkeypatch.setattr(sys, "stdin", io.StringIO("Where is"))
    assert said("generate", "first", *words) == text
    assert said("generate", "first", "--prompt", "", *words)


def test_a_prompt_may_look_like_a_setting(said):
    assert said("generate", "first", "--prompt", "self.x=1", "--max-tokens", 2).startswith("self.x=1")


def test_generate_many_is_each_alone(reported, said):
    """Also where prompts differ in length, and text n has the n-th seed."""
    words = ["generate", "first", "--max-tokens", 6]
    prompts = ["Where", "Where is the", "A"]
    together = reported(*words, *(part for text in prompts for part in ("--prompt", text)))["completions"]
    alone = [reported(*words, "--prompt", text, "--seed", n) for n, text in enumerate(prompts)]
    assert [one["completion"] for one in together] == [one["completion"] for one in alone]
    three = reported(*words, "--prompt", "A", "--num", 3, "--batch", 2)["completions"]
    assert three[2]["completion"] == together[2]["completion"]
    assert said(*words, "--prompt", "A", "--num", 2, "--chat").startswith("--- 1 of 2\n")


def test_generate_ends_before_a_stop_string(reported):
    words = ["generate", "first", "--max-tokens", 12, "--temperature", 0, "--prompt", "Where is"]
    whole = reported(*words)["completion"]
    stop = whole[3:5]
    ended = whole[: whole.index(stop)]
    assert reported(*words, "--stop", stop)["completion"] == ended
    both = reported(*words, "--prompt", "Where is", "--stop", stop)["completions"]
    assert [one["completion"] for one in both] == [ended, ended]
    assert main(["generate", "first", "--stop", ""]) == Exit.USER_MISTAKE


def test_generate_chats(said, reported, monkeypatch):
    words = ["generate", "first", "--chat", "--max-tokens", 4]
    answer = said(*words, "--prompt", "hello")
    assert reported(*words, "--prompt", "hello")["completion"] + "\n" == answer
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nagain\n"))
    assert said(*words).startswith(answer)


def test_eval_measures_held_out_text_or_other_text(said, reported, house):
    report = reported("eval", "first")
    assert report["perplexity"] == pytest.approx(math.exp(report["loss"]))
    assert "nats per token" in said("eval", "runs/first/checkpoints/step-4")
    (house / "other.txt").write_text("zzzz qqqq " * 500)
    assert reported("eval", "first", "data.source=other.txt")["loss"] > report["loss"]
    assert reported("eval", "first", "--split", "train", "--batches", 1)["split"] == "train"


def test_benchmarks_without_the_harness_are_refused_with_the_line_that_installs_it(house, monkeypatch, capsys):
    monkeypatch.chdir(house)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # what is not installed is not found
    assert main(["eval", "first", "--tasks", "arc_easy"]) == Exit.USER_MISTAKE
    assert "pip install 'shardwise[tasks]'" in capsys.readouterr().err


def test_eval_reads_the_settings_of_the_run_it_was_given(said, reported, house, tmp_path, monkeypatch):
    """A run of the same name nearby is another run."""
    (tmp_path / "runs/first").mkdir(parents=True)
    (tmp_path / "runs/first/config.toml").write_text('[data]\nsource = "absent.txt"\n')
    expected = reported("eval", "first")["loss"]
    monkeypatch.chdir(tmp_path)
    assert reported("eval", house / "runs/first")["loss"] == expected


def test_export_is_what_transformers_loads(said, house):
    from transformers import AutoModelForCausalLM

    lines = said("export", "first", "--out", "exported").splitlines()
    assert any(line.startswith("proof    transformers ") and "largest difference of logits" in line for line in lines)
    tokens = torch.arange(1, 25)[None]
    theirs = AutoModelForCausalLM.from_pretrained(house / "exported")
    ours = find_weights("first").load(torch.device("cpu"))
    with torch.no_grad():
        assert (theirs(tokens).logits - ours(tokens)).abs().max() <= 1e-4


def test_convert_there_and_back_loses_nothing(said, house):
    said("export", "first", "--no-verify", "--out", "there")
    said("convert", "there", "--to", "shardwise", "--out", "ours")
    said("convert", "ours", "--to", "hf", "--out", "back")
    assert (house / "there/model.safetensors").read_bytes() == (house / "back/model.safetensors").read_bytes()
    words = ["--prompt", "Where", "--max-tokens", 5]
    assert said("generate", "ours", *words) == said("generate", "back", *words) == said("generate", "first", *words)


def test_data_prepare_and_show(said, reported, house):
    chat = [{"prompt": f"{i} + {i}?", "response": f"{2 * i}."} for i in range(40)]
    (house / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chat))
    report = reported("data", "prepare", "sums.jsonl", "--out", "sums")
    assert report["documents"] == 40 and report["chat"]
    assert "⟦" in said("data", "show", "sums", "--rendered", "--seq-len", 64)
    rows = reported("data", "show", "sums", "--rendered", "--seq-len", 64, "--num", 1)["samples"]
    assert any(run["loss"] for run in rows[0]["runs"]) and not all(run["loss"] for run in rows[0]["runs"])


def test_a_reader_that_goes_away_ends_nothing(house):
    """`shardwise train … | head -1`: the pipe breaks, the run goes on to its end."""
    command = [sys.executable, "-m", "shardwise", "train", *SMALL, "train.steps=3", "run.name=piped", "--nproc", "1"]
    with open(house / "errors", "w+") as errors:
        process = subprocess.Popen(command, cwd=house, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert process.stdout.readline().startswith("starting")
        process.stdout.close()
        try:
            code = process.wait(timeout=180)
        except subprocess.TimeoutExpired:
            process.kill()
            pytest.fail("the run did not end within 180 s after its reader went away")
        errors.seek(0)
        said = errors.read()
    assert code == Exit.DONE and said in ("", "loading  ...\n"), said  # a busy machine takes its time to load torch
    assert RunDir(house / "runs/piped").state() == "finished"


def test_a_bug_of_ours_is_three_lines_and_a_file(monkeypatch, capsys, tmp_path):
    verb = ModuleType("shardwise.cli.broken")
    verb.HELP, verb.add_arguments, verb.run = "fails", lambda parser: None, lambda args: 1 // 0
    monkeypatch.setitem(sys.modules, verb.__name__, verb)
    monkeypatch.setitem(VERBS, "broken", verb.HELP)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["broken"]) == Exit.BUG
    assert capsys.readouterr().err.startswith("error: ZeroDivisionError")
    assert "Traceback" in next(tmp_path.iterdir()).read_text()


def test_help_of_every_verb_is_there():
    for verb in VERBS:
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0
