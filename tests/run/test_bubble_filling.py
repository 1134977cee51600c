"""Idle slots that evaluate: training does not change by one bit, and the losses are those of an ordinary evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from commands import SMALL, losses_of, warm_command
from ranks import RankPool

from shardwise.errors import Exit
from shardwise.model.experts import moe_layers
from shardwise.optim.build import build_optimizer
from shardwise.parallel.engine import Engine
from shardwise.parallel.pipeline.execute import LAST_SENDS, Side
from shardwise.parallel.pipeline.idle_slots import fill_bubbles
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch, trial_plan
from shardwise.run.bubble_filling import FIRST_ROUND, PLAIN_STEPS, BubbleFiller, action_seconds, side_seconds
from shardwise.run.clock import Clock, Span
from shardwise.run.step import accumulate, update
from shardwise.spec.actions import NAMES
from shardwise.spec.presets import preset
from shardwise.spec.split import even_split

CPU = torch.device("cpu")
SHAPE = {"num_layers": 4, "hidden": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn": 37, "vocab": 53}
SPECS = {
    "dense": preset("tiny").with_overrides(SHAPE),
    "tied": preset("tiny").with_overrides(SHAPE | {"tied": True}),
    "experts": preset("tiny-moe").with_overrides(SHAPE | {"num_experts": 4, "aux_loss_coef": 0.1}),
}
TRIAL = Trial(global_batch=8, micro_batch=2, seq_len=12, documents=True, precision="fp32")
TWO_RANKS = [
    ("dense", {"pp": 2, "schedule": "gpipe"}),
    ("tied", {"pp": 2, "schedule": "1f1b"}),
    ("experts", {"pp": 2, "schedule": "interleaved", "virtual_stages": 2}),
    ("dense", {"pp": 2, "schedule": "zero-bubble"}),
    ("tied", {"pp": 2, "schedule": "zbv", "virtual_stages": 2}),
]
FOUR_RANKS = [
    ("dense", {"pp": 4, "schedule": "1f1b"}),
    ("experts", {"pp": 4, "schedule": "gpipe"}),
    ("tied", {"dp": 2, "pp": 2, "schedule": "gpipe"}),
    ("dense", {"tp": 2, "sequence": True, "pp": 2, "schedule": "zero-bubble"}),
]


def engine_of(model: str, layout: dict[str, Any]) -> Engine:
    split = even_split(SHAPE["num_layers"], layout["pp"] * layout.get("virtual_stages", 1))
    return build_trial(SPECS[model], trial_plan(TRIAL, split=split, **layout), TRIAL, dist.get_rank(), CPU)


def batch_of(engine: Engine, step: int) -> tuple[Any, int]:
    return trial_batch(engine.spec, engine.plan, TRIAL, step, engine.mesh.at.dp)


def trained(model: str, layout: dict[str, Any], num_filled: int) -> dict[str, Any]:
    """Three steps; `num_filled` held-out micro-batches in each, wherever the lists allow it."""
    engine = engine_of(model, layout)
    pipeline = engine.pipeline
    optimizer, clock = build_optimizer(TRIAL.optimizer, engine.locals()), Clock(CPU)
    held_out = (batch_of(engine, 98)[0].microbatches + batch_of(engine, 99)[0].microbatches)[:num_filled]
    table, number = fill_bubbles(pipeline.table, pipeline.owners, lambda action: float(action.kind != "E"), num_filled)
    assert number == num_filled
    found: dict[str, Any] = {"losses": [], "side": [], "evaluated": []}
    for step in range(1, 4):
        if num_filled:
            engine.train(False)
            found["evaluated"] += [float(engine.evaluate([micro])[0]) for micro in held_out]
            engine.train(True)
            side = pipeline.side = Side(table, held_out, torch.zeros(num_filled, dtype=torch.float64))
        batch, num_targets = batch_of(engine, step)
        clock.begin()
        norm, finish = accumulate(engine, batch, num_targets, clock)
        found["losses"].append((float(norm), finish().tolist()))
        found["counts"] = [layer.tokens_per_expert.tolist() for model in engine.models for layer in moe_layers(model)]
        update(engine, optimizer, norm, lr=TRIAL.optimizer.lr, clip=TRIAL.clip, clock=clock)
        if num_filled:
            found["side"] += side.losses.tolist() if engine.mesh.counts_loss else [0.0] * num_filled
            assert side_seconds(clock.spans) > 0 and pipeline.side is None
            assert all(model.training for model in engine.models)
    found["parameters"] = [shard.local.detach().clone() for shard in engine.shards]
    return found


def trained_both_ways(cases: list[tuple[str, dict[str, Any]]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return [(trained(*case, num_filled=0), trained(*case, num_filled=3)) for case in cases]


@pytest.mark.parametrize(("world", "cases"), [(2, TWO_RANKS), (4, FOUR_RANKS)])
def test_training_does_not_change_by_one_bit(world: int, cases: list[Any], ranks: RankPool) -> None:
    by_rank = ranks.run(trained_both_ways, world, cases)
    for number, (model, layout) in enumerate(cases):
        for of_rank in by_rank:
            plain, filled = of_rank[number]
            assert filled["losses"] == plain["losses"], (model, layout)
            assert filled["counts"] == plain["counts"], (model, layout)
            assert len(plain["parameters"]) == len(filled["parameters"]) > 0
            assert all(map(torch.equal, plain["parameters"], filled["parameters"])), (model, layout)
            assert filled["side"] == filled["evaluated"], (model, layout)
        assert any(loss for of_rank in by_rank for loss in of_rank[number][1]["side"]), "somebody has the losses"


# Measure, agree, fill ------------------------------------------------------------------------------------------------


def spans_of(engine: Engine, seconds: dict[str, float]) -> list[Span]:
    """A step as a clock would have seen it, had every action taken so long."""
    mine = engine.pipeline.actions
    spans = [Span("compute", NAMES[kind], 0.0, seconds[kind], micro, stage) for kind, stage, micro in mine]
    return [*spans, Span("bubble", LAST_SENDS, 0.0, 0.0)]


def filled_run(filled_step_s: float, rounds: int) -> dict[str, Any]:
    """gpipe over two ranks, 4 micro-batches: room for two. Weights stay, so a pass may take several steps and be
    checked."""
    engine = engine_of("dense", {"pp": 2, "schedule": "gpipe"})
    filler = BubbleFiller(engine, lambda number: batch_of(engine, 50 + number)[0].microbatches, num_batches=3)
    clock, batch, lines, placed = Clock(CPU), batch_of(engine, 1), [], []
    steps = 1 + rounds * PLAIN_STEPS + FIRST_ROUND * (2**rounds - 1)
    for step in range(1, steps + 1):
        filler.before_step()
        clock.begin()
        accumulate(engine, *batch, clock)
        engine.zero_grad()
        if filler.side is None:
            placed.append(0)
            filler.after_step(step, spans_of(engine, {"F": 1.0, "B": 2.0}), 1.0)
        else:
            placed.append(len(filler.side.microbatches))
            lines.append(filler.after_step(step, clock.spans, filled_step_s))
    total = torch.zeros(2, dtype=torch.float64)
    for number in range(3):
        held_out, num_targets = batch_of(engine, 50 + number)
        total += torch.stack([engine.evaluate(held_out.microbatches)[0], torch.tensor(num_targets / 2).double()])
    dist.all_reduce(total)
    return {
        "placed": placed,
        "lines": [line for line in lines if line],
        "filled": filler.result(),
        "loss": float(total[0] / total[1]),
    }


def test_measured_times_become_slots_and_a_held_out_loss(ranks: RankPool) -> None:
    for found in ranks.run(filled_run, 2, 1.0, 1):
        assert found["placed"] == [0] * (1 + PLAIN_STEPS) + [2] * FIRST_ROUND
        first, second = found["lines"]
        assert (first["event"], first["first_step"], first["step"], first["batches"]) == ("side_eval", 5, 10, 3)
        assert first["eval_loss"] == pytest.approx(found["loss"], abs=1e-12)
        assert (second["first_step"], second["step"]) == (11, 16) and found["filled"].newest == second
        assert found["filled"].batches == 2 * FIRST_ROUND / 4
        assert 0 < found["filled"].share < 1


def test_steps_that_become_longer_are_filled_less(ranks: RankPool) -> None:
    for found in ranks.run(filled_run, 2, 1.04, 2):
        later = found["placed"][1 + PLAIN_STEPS + FIRST_ROUND :]
        assert later == [0] * PLAIN_STEPS + [1] * (2 * FIRST_ROUND)
    for found in ranks.run(filled_run, 2, 1.02, 2):
        assert found["placed"][-1] >= 2


def test_the_time_of_an_action_has_what_follows_from_it() -> None:
    spans = [
        Span("data_wait", "next batch", 0.0, 9.0),
        Span("bubble", "wait for a stage", 0.0, 5.0, 0, 1),
        Span("compute", "forward", 0.0, 1.0, 0, 1),
        Span("compute", "backward", 0.0, 2.0, 0, 1),
        Span("compute", "complete gradients", 0.0, 0.5, stage=1),
        Span("bubble", "held-out forward", 0.0, 0.7, 4, 1),
        Span("bubble", LAST_SENDS, 0.0, 3.0),
        Span("comm_exposed", "norm and loss", 0.0, 4.0),
    ]
    assert action_seconds(spans) == {("F", 1, 0): 1.0, ("B", 1, 0): 2.5, ("E", 1, 4): 0.7}
    assert side_seconds(spans) == 0.7


# The command ---------------------------------------------------------------------------------------------------------


def test_a_run_that_fills_its_idle_slots(ranks: RankPool, tmp_path: Path) -> None:
    words = [*SMALL, "train.micro_batch=1", "train.steps=9", "parallel.layout=pp=2 schedule=gpipe", "--no-verify"]
    said = {}
    for name in ("none", "eval"):
        more = [f"parallel.fill_bubbles={name}", f"run.name={name}"]
        done = warm_command(ranks, "train", *words, *more, cwd=tmp_path, nproc=2)
        assert done.returncode == Exit.DONE, done.stdout + done.stderr
        said[name] = done.stdout
    for key in ("loss", "grad_norm"):
        assert losses_of(tmp_path / "runs/eval", key) == losses_of(tmp_path / "runs/none", key)
    assert "\nfill     " in said["eval"] and "\nfill     " not in said["none"]
    lines = [json.loads(line) for line in (tmp_path / "runs/eval/metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line and "event" not in line]
    assert len(steps) == 9 and all(0 <= line["bubble_filled_s"] <= line["bubble_s"] + 1e-9 for line in steps)
    assert all(line["bubble_filled_s"] == 0 for line in steps[: 1 + PLAIN_STEPS])
    (whole,) = [line for line in lines if line.get("event") == "bubble_filled"]
    assert (whole["share"] > 0) == (whole["batches"] > 0)
