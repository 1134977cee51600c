"""The loop as a user meets it, on one process: files, determinism, resuming, stopping, golden losses."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from commands import SMALL, losses_of

from shardwise.errors import Exit

GOLDEN = Path(__file__).parents[1] / "golden" / "losses.json"
PARTS = ("data_wait_s", "compute_s", "comm_exposed_s", "bubble_s", "optimizer_s", "other_s")


def train(run_here, name: str, *words: object) -> Path:
    assert run_here("train", "--nproc", 1, *SMALL, f"run.name={name}", *words) == Exit.DONE
    return Path("runs") / name


def test_golden_losses_do_not_move(run_here):
    """A refactor that changes these changes what every user computes. Accumulation is on, clipping is on."""
    run = train(run_here, "golden", "train.steps=12", "train.micro_batch=2", "memory.precision=fp64")
    expected = json.loads(GOLDEN.read_text())
    assert list(losses_of(run).values()) == pytest.approx(expected["losses"], abs=1e-10)


def test_two_runs_with_one_seed_agree_to_the_last_digit(run_here):
    a = train(run_here, "a", "train.steps=6")
    torch.seed()  # as torch does in every new process: what it draws is not the run's
    b = train(run_here, "b", "train.steps=6", "checkpoint.every=2")  # which changes nothing
    c = train(run_here, "c", "train.steps=6", "train.seed=1")
    assert losses_of(a) == losses_of(b) != losses_of(c)
    files = {path.name: path.read_bytes() for path in (a / "checkpoints" / "step-6").glob("*.safetensors")}
    assert len(files) == 3  # weights, optimizer, rng
    for name, content in files.items():
        assert content == (b / "checkpoints" / "step-6" / name).read_bytes(), f"{name} differs"


def test_accumulation_does_not_change_the_loss(run_here):
    whole = losses_of(train(run_here, "whole", "train.steps=5", "train.micro_batch=8", "memory.precision=fp64"))
    odd = losses_of(train(run_here, "odd", "train.steps=5", "train.micro_batch=3", "memory.precision=fp64"))
    assert list(whole.values()) == pytest.approx(list(odd.values()), abs=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd", "momentum", "adagrad", "rmsprop"])
def test_a_resumed_run_equals_an_uninterrupted_one(run_here, optimizer):
    words = [f"optimizer.name={optimizer}", "optimizer.warmup=2", "checkpoint.every=4"]
    run = train(run_here, "again", "train.steps=8", *words)
    straight = losses_of(run)
    assert run_here("resume", run, "--from", 4) == Exit.DONE
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line.get("event") == "resumed"] == [4]
    assert sum("loss" in line and "event" not in line for line in lines) == 12  # steps 5-8 were really trained twice
    assert losses_of(run) == straight
    assert (run / "checkpoints" / "abandoned-step-8").is_dir()


def test_a_damaged_checkpoint_is_passed_over_and_named(run_here, capsys):
    run = train(run_here, "broken", "train.steps=8", "checkpoint.every=4")
    weights = run / "checkpoints" / "step-8" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1  # one bit
    weights.write_bytes(content)
    assert run_here("resume", run, "--allow", "train.steps", "train.steps=9") == Exit.DONE
    assert "passing over step-8: its digest does not match" in capsys.readouterr().out
    assert "resumed" in (run / "metrics.jsonl").read_text() and max(losses_of(run)) == 9


def test_the_loss_falls_below_a_unigram_model(run_here):
    run = train(run_here, "learn", "train.steps=60", "optimizer.lr=1e-2")
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["event"] == "finished"
    assert last["loss"] < 0.85 * last["unigram_loss"]


def test_metrics_have_every_field_and_their_parts_add_up(run_here):
    run = train(run_here, "fields", "train.steps=3", "train.eval_every=2")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line and "event" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    for line in steps:
        for key in ("grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "mfu", "peak_memory_bytes", "wall_time"):
            assert math.isfinite(line[key]) and line[key] >= 0, key
        assert sum(line[part] for part in PARTS) == pytest.approx(line["step_s"], rel=1e-6)
        assert line["tokens"] == 8 * 32
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 3]
    finished = lines[-1]
    assert finished["predicted"].keys() == finished["measured"].keys() == {"step_s", "memory_bytes"}
    assert finished["measured"]["memory_bytes"] > 0


@pytest.mark.parametrize(("num_steps", "compared"), [(3, 2), (22, 18)])
def test_predicted_and_measured_are_compared_after_20_steps_or_at_the_end(run_here, capsys, num_steps, compared):
    """The first step warms up, and the two first are watched, where there are more."""
    run = train(run_here, f"compared-{num_steps}", f"train.steps={num_steps}")
    said = [line.split() for line in capsys.readouterr().out.splitlines()]
    at = next(number for number, words in enumerate(said) if words[:1] == ["time"])
    assert "predicted" in said[at] and said[at + 1][0] == "memory" and "predicted" in said[at + 1]
    later = [words for words in said[at:] if words[:1] == ["step"]]
    assert bool(later) == (num_steps > 20)  # the run goes on after it
    plan = json.loads((run / "plan.json").read_text())
    assert plan["measured"]["step"]["step"]["predicted"] == pytest.approx(plan["prediction"]["step_s"])
    assert plan["measured"]["step"]["step"]["measured"] > 0 and plan["measured"]["steps"] == compared
    assert plan["measured"]["memory"]["fullest"]["peak"] > 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["parts"] == plan["measured"]["step"] and last["memory"] == plan["measured"]["memory"]


def test_a_sample_is_as_long_as_asked(run_here, capsys):
    for length in (5, 0):
        train(
            run_here, f"sample-{length}", "train.steps=1", "train.sample_prompt=Once", f"train.sample_tokens={length}"
        )
        samples = [line for line in capsys.readouterr().out.splitlines() if line.startswith("sample   ")]
        texts = [json.loads(line.removeprefix("sample   ")) for line in samples]
        assert [text[:4] for text in texts] == ["Once"] * (length > 0)
        assert all(4 < len(text) <= 4 + length for text in texts)


def test_events_are_sampled(run_here):
    run = train(run_here, "events", "train.steps=6", "run.events_every=3")
    events = [json.loads(line) for line in (run / "events" / "rank0.jsonl").read_text().splitlines()]
    assert {event["step"] for event in events if event["kind"] != "memory"} == {3, 6}
    assert {event["step"] for event in events if event["kind"] == "memory"} == {2}
    assert {event["kind"] for event in events} >= {"compute", "data", "optimizer"}
    assert all(event["dur_us"] >= 0 for event in events)


def test_a_time_limit_stops_resumably(run_here):
    for limit in ("1s", "10s", "100s"):  # a busy machine may need longer for its first step
        words = [*SMALL, f"run.name=short-{limit}", "train.steps=100000", f"train.time_limit={limit}"]
        assert run_here("train", "--nproc", 1, *words) == Exit.STOPPED
        run = Path(f"runs/short-{limit}")
        if losses_of(run):
            break
    done = max(losses_of(run))
    assert (run / "checkpoints" / f"step-{done}").is_dir()
    assert run_here("resume", run, "--allow", "train.steps", f"train.steps={done + 2}", "--allow", "train.time_limit",
                    "train.time_limit=1h") == Exit.DONE  # fmt: skip
    assert max(losses_of(run)) == done + 2


def test_a_diverged_run_stops_with_its_own_code(run_here):
    words = [*SMALL, "run.name=wild", "train.steps=40", "optimizer.name=sgd", "optimizer.lr=1e30", "train.clip=0"]
    assert run_here("train", "--nproc", 1, *words) == Exit.DIVERGED
    assert json.loads(Path("runs/wild/metrics.jsonl").read_text().splitlines()[-1])["event"] == "failed"


def test_resume_refuses_what_would_change_the_run(run_here, capsys):
    run = train(run_here, "fixed", "train.steps=2")
    assert run_here("resume", run, "optimizer.lr=0.5") == Exit.USER_MISTAKE
    assert "--allow optimizer.lr" in capsys.readouterr().err


def test_resume_auto_starts_then_continues_then_rests(run_here, capsys):
    words = ["train", "--resume", "auto", "--nproc", 1, *SMALL, "run.name=job", "train.steps=3"]
    assert run_here(*words) == Exit.DONE
    assert run_here(*words) == Exit.DONE
    assert "nothing to do" in capsys.readouterr().out


def test_dry_run_trains_nothing(run_here, capsys):
    assert run_here("train", "--dry-run", *SMALL) == Exit.DONE
    out = capsys.readouterr().out
    assert "# command line" in out and "predicted" in out and "sample" in out
    assert not list(Path("runs").glob("*/config.toml"))


def test_a_run_in_use_is_refused(run_here, capsys):
    from shardwise.run.rundir import RunDir

    run = train(run_here, "busy", "train.steps=2")
    with RunDir(run).lock():
        assert run_here("resume", run) == Exit.USER_MISTAKE
    assert "already in use" in capsys.readouterr().err
    assert run_here("train", "--nproc", 1, *SMALL, "run.name=busy") == Exit.USER_MISTAKE
    assert "never overwritten" in capsys.readouterr().err


def test_moe_trains_and_reports_router_losses(run_here):
    run = train(run_here, "moe", "model.preset=tiny-moe", "model.expert_ffn=32", "train.steps=3", "run.events_every=1")
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[1])
    assert line["aux_loss"] > 0
    assert 0 <= line["expert_load_min"] < 1 < line["expert_load_max"] and line["dropped_tokens"] == 0
    events = [json.loads(line) for line in (run / "events" / "rank0.jsonl").read_text().splitlines()]
    layers = [line["tokens"] for line in events if line["kind"] == "experts" and line["step"] == 1]
    assert layers and max(max(tokens) / (sum(tokens) / len(tokens)) for tokens in layers) == line["expert_load_max"]
