"""Number formats, 8-bit states and the format of gradient sums in every kind of layout, against the plain model in
one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.checkpoint import store
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import train_in_layout, trial_plan
from shardwise.prove.verify import compare
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import OptimizerConfig

CPU = torch.device("cpu")

SHAPE = {"num_layers": 2, "hidden": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn": 128, "vocab": 128}
SPEC = preset("tiny").with_overrides(SHAPE)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "dp=2 zero=2": {"dp": 2, "zero": 2},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "tp=2": {"tp": 2},
    "pp=2": {"pp": 2, "split": (1, 1)},
}
LOW_BIT = OptimizerConfig(name="adamw8bit", lr=1e-3)
TRIALS = {
    # Without clipping, as everywhere in 16 bits: a norm that differs in its seventh digit moves roundings
    # (tests/parity).
    "fp16": Trial(precision="fp16", clip=0.0),
    "fp16-true": Trial(precision="fp16-true", clip=0.0),
    "bf16-true": Trial(precision="bf16-true", clip=0.0),
    "fp8": Trial(precision="fp8", clip=0.0),
    "fp8 head": Trial(precision="fp8", clip=0.0, fp8_head=True, fp8_recipe="tensorwise"),
    "adamw8bit": Trial(precision="fp32", optimizer=LOW_BIT),
    "sums in bf16": Trial(precision="fp32", clip=0.0, reduce_dtype="bf16"),
    "sums in fp32": Trial(precision="bf16-true", clip=0.0, reduce_dtype="fp32"),
    "scaled loss in fp64": Trial(precision="fp64", loss_scale=2.0**16, through_fsdp=True),
}
EXACT = (1e-6, 1e-6)
LIMITS: dict[str, dict[str, tuple[float, float]]] = {
    # (losses, gradients of the first step relative to a tensor's largest entry). EXACT is fp32's own noise, from
    # another order of sums over ranks. Everything else is a rounding of the format that falls elsewhere, of 2^-11 in
    # fp16, 2^-8 in bf16, 2^-4 in fp8: tensor parallelism adds up two rounded halves inside of layers.
    "fp16": {"tp=2": (5e-4, 8 * 2**-11)},
    # Gradients are 16 bits wide, so sums over micro-batches and ranks are rounded too.
    "fp16-true": {"dp=2 zero=2": (5e-4, 8 * 2**-11), "dp=2 zero=3": (5e-4, 8 * 2**-11), "tp=2": (5e-4, 8 * 2**-11)},
    "bf16-true": {"dp=2 zero=2": (1e-3, 8 * 2**-8), "dp=2 zero=3": (1e-3, 8 * 2**-8), "tp=2": (1e-3, 8 * 2**-8)},
    # An e4m3 gradient has three bits, and slices have scales of their own.
    "fp8": {"tp=2": (5e-3, 4 * 2**-4)},
    "fp8 head": {"tp=2": (5e-3, 4 * 2**-4)},
    # Blocks of 256 are cut from what a rank holds, and what is below 4096 numbers there stays in fp32.
    "adamw8bit": {"dp=2 zero=2": (2e-4, 1e-6), "dp=2 zero=3": (2e-4, 1e-6), "tp=2": (2e-4, 1e-6)},
    # FSDP2 rounds the gradients of every micro-batch, in one process too; the truth rounds none.
    "sums in bf16": dict.fromkeys(LAYOUTS, (2e-4, 4 * 2**-8)),
    "sums in fp32": dict.fromkeys(LAYOUTS, (1e-3, 8 * 2**-8)),
    "scaled loss in fp64": dict.fromkeys(LAYOUTS, (1e-9, 1e-9)),
}


def trained(spec: ModelSpec, rows: list[tuple[Trial, Plan]]) -> list[Record]:
    return [train_in_layout(spec, plan, trial, dist.get_rank(), CPU) for trial, plan in rows]


def trained_plainly(spec: ModelSpec, trials: list[Trial]) -> list[Record]:
    return [train_plain(spec, trial) for trial in trials]


@pytest.fixture(scope="module")
def records(ranks: Any) -> dict[tuple[str, str], tuple[Record, Record]]:
    """(technique, layout): what the layout found, and the truth. All of it in three jobs."""
    [truths] = ranks.run(trained_plainly, 1, SPEC, list(TRIALS.values()), timeout=120)
    found = {}
    for world in (1, 2):
        rows = {
            (name, layout): (trial, trial_plan(trial, **degrees))
            for name, trial in TRIALS.items()
            for layout, degrees in LAYOUTS.items()
        }
        rows = {key: row for key, row in rows.items() if row[1].world == world}
        found |= zip(rows, ranks.run(trained, world, SPEC, list(rows.values()), timeout=240)[0], strict=True)
    by_name = dict(zip(TRIALS, truths, strict=True))
    return {(name, layout): (record, by_name[name]) for (name, layout), record in found.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TRIALS)
def test_a_layout_computes_what_one_process_computes(name: str, layout: str, records: Any) -> None:
    record, truth = records[name, layout]
    (losses, norms, gradients, _), worst = compare(record, truth)
    most_losses, most_gradients = LIMITS[name].get(layout, EXACT)
    assert losses <= most_losses and gradients <= most_gradients, worst
    assert norms <= max(most_losses, most_gradients)  # those of later steps come from weights that have moved


def test_formats_differ_from_each_other(records: Any) -> None:
    """Else a row above could pass because its format was never used."""
    losses = {name: records[name, "one process"][0].losses for name in TRIALS}
    assert len({tuple(values) for name, values in losses.items() if name != "sums in fp32"}) == len(TRIALS) - 1


# Checkpoints between layouts -----------------------------------------------------------------------------------------


def third_losses(spec: ModelSpec, trial: Trial, first: Plan, others: list[Plan], folder: str) -> list[float]:
    """Two steps in one layout, and the loss of the third and fourth in every other one, from its checkpoint."""
    from shardwise.optim.build import build_optimizer
    from shardwise.prove.trial import build_trial, trial_batch
    from shardwise.run.clock import Clock
    from shardwise.run.saving import Saver
    from shardwise.run.state import restore_state
    from shardwise.run.step import run_step

    def steps(engine: Any, optimizer: Any, plan: Plan, numbers: tuple[int, ...]) -> list[float]:
        losses = []
        for step in numbers:
            batch, num_targets = trial_batch(spec, plan, trial, step, engine.mesh.at.dp)
            result = run_step(
                engine, optimizer, batch, num_targets=num_targets, lr=1e-3, clip=trial.clip, clock=Clock(CPU)
            )
            losses.append(result.loss)
        return losses

    def build(plan: Plan) -> tuple[Any, Any]:
        engine = build_trial(spec, plan, trial, dist.get_rank(), CPU)
        return engine, build_optimizer(trial.optimizer, engine.locals())

    engine, optimizer = build(first)
    steps(engine, optimizer, first, (1, 2))
    Saver(Path(folder), engine, optimizer).save(2, dict)
    dist.barrier()
    found = []
    for plan in others:
        engine, optimizer = build(plan)
        restore_state(engine, optimizer, store.Checkpoint(Path(folder) / "step-2", 2))
        found += steps(engine, optimizer, plan, (3, 4))
    return found


@pytest.mark.parametrize(("name", "limit"), [("adamw8bit", 2e-4), ("fp16-true", 5e-4)])
def test_states_go_on_in_other_layouts(name: str, limit: float, ranks: Any, tmp_path: Path) -> None:
    """States are saved in fp32 under the names that every optimizer has; 8-bit ones are rounded again, in other
    blocks."""
    trial = replace(TRIALS[name], num_steps=4)
    plans = [trial_plan(trial, **LAYOUTS[layout]) for layout in ("dp=2 zero=3", "tp=2", "pp=2", "dp=2 zero=2")]
    [truth] = ranks.run(trained_plainly, 1, SPEC, [trial])[0]
    for losses in ranks.run(third_losses, 2, SPEC, trial, plans[0], plans, str(tmp_path), timeout=120):
        assert losses == pytest.approx(truth.losses[2:] * len(plans), abs=limit)
    states = store.Checkpoint(tmp_path / "step-2", 2).load("optimizer")
    assert {value.dtype for value in states.values()} == {torch.float32}
    assert states["exp_avg/layers.0.attention.q.weight"].shape == (64, 64)


# Overflow ------------------------------------------------------------------------------------------------------------


def overflowing_on_one_rank(spec: ModelSpec, plans: list[Plan], trial: Trial) -> list[dict[str, Any]]:
    """Three steps. In the second, one rank's gradients overflow inside of a layer."""
    from shardwise.optim.build import build_optimizer
    from shardwise.prove.trial import build_trial, trial_batch
    from shardwise.run.clock import Clock
    from shardwise.run.step import run_step

    found = []
    for plan in plans:
        engine = build_trial(spec, plan, trial, dist.get_rank(), CPU)
        optimizer = build_optimizer(trial.optimizer, engine.locals())
        results, moved = [], []
        for step in (1, 2, 3):
            batch, num_targets = trial_batch(spec, plan, trial, step, engine.mesh.at.dp)
            before = [parameter.detach().clone() for parameter in engine.locals()]
            handle = None
            if step == 2 and dist.get_rank() == 1:
                block: Any = list(engine.models[0].layers.values())[-1]
                handle = block.feedforward.register_forward_hook(_overflow_backward)
            results.append(
                run_step(engine, optimizer, batch, num_targets=num_targets, lr=1e-3, clip=0.5, clock=Clock(CPU))
            )
            if handle is not None:
                handle.remove()
            moved.append(any(not torch.equal(a, b) for a, b in zip(before, engine.locals(), strict=True)))
        found.append(
            {
                "skipped": [result.skipped for result in results],
                "scales": [result.scale for result in results] + [engine.scaler.scale],
                "finite": [bool(torch.isfinite(torch.tensor(result.grad_norm))) for result in results],
                "moved": moved,
                "states": len({float(state["step"]) for state in optimizer.state.values()}),
            }
        )
    return found


def _overflow_backward(module: Any, args: Any, output: torch.Tensor) -> None:
    output.register_hook(lambda gradient: gradient * 1e8)


@pytest.mark.parametrize("precision", ["fp16", "fp16-true"])
def test_an_overflow_on_one_rank_is_everybodys(precision: str, ranks: Any) -> None:
    trial = Trial(precision=precision)
    degrees = [{"dp": 2}, {"dp": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "split": (1, 1)}]
    plans = [trial_plan(trial, **fields) for fields in degrees]
    expected = {
        "skipped": [False, True, False],
        "scales": [2.0**16, 2.0**16, 2.0**15, 2.0**15],
        "finite": [True, False, True],
        "moved": [True, False, True],
        "states": 1,
    }
    for rank in ranks.run(overflowing_on_one_rank, 2, SPEC, plans, trial, timeout=120):
        assert rank == [expected] * len(plans)
