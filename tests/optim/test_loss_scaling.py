"""The loss scale: how it moves, when it gives up, what of it is saved; and runs in fp16 as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import SMALL, losses_of, warm_command
from torch import nn

from shardwise.checkpoint.manifest import sealed
from shardwise.config.load import load_config
from shardwise.errors import Exit, UserError
from shardwise.optim.loss_scaling import FIRST, LARGEST, PATIENCE, SMALLEST, LossScaler, scaler_of, unscaled
from shardwise.optim.overflow import first_overflow
from shardwise.spec.plan import Plan


def dynamic(**fields: Any) -> LossScaler:
    return LossScaler(FIRST, is_active=True, is_dynamic=True, **fields)


def test_it_halves_at_once_and_doubles_after_good_steps() -> None:
    scaler = dynamic(grows_after=3)
    scales = []
    for overflowed in (True, False, False, True, False, False, False, False):
        scaler.update(overflowed=overflowed)
        scales.append(scaler.scale / FIRST)
    assert scales == [0.5, 0.5, 0.5, 0.25, 0.25, 0.25, 0.5, 0.5]


def test_it_stays_between_its_bounds() -> None:
    low, high = dynamic(), dynamic(grows_after=1)
    for _ in range(60):
        low.update(overflowed=True)
        high.update(overflowed=False)
    assert (low.scale, high.scale) == (SMALLEST, LARGEST)


def test_it_gives_up_only_where_no_smaller_scale_is_left() -> None:
    scaler, fixed = dynamic(), LossScaler(1024.0, is_active=True)
    for overflows in range(1, PATIENCE + 2):
        assert not scaler.is_stuck and not fixed.is_stuck, overflows
        scaler.update(overflowed=True)
        fixed.update(overflowed=True)
    assert scaler.is_stuck and fixed.is_stuck and fixed.scale == 1024.0
    scaler.update(overflowed=False)
    assert not scaler.is_stuck


def test_what_is_saved_comes_back_and_a_fixed_scale_stays() -> None:
    scaler = dynamic(grows_after=5)
    for overflowed in (True, False, False):
        scaler.update(overflowed=overflowed)
    other, fixed = dynamic(grows_after=5), LossScaler(8.0, is_active=True)
    saved = json.loads(json.dumps(scaler.to_dict()))
    other.restore(saved)
    fixed.restore(saved)
    assert other == scaler and fixed.scale == 8.0
    fresh = dynamic()
    fresh.restore({})  # the checkpoint of a run in another format
    assert fresh == dynamic()


@pytest.mark.parametrize(
    ("layout", "scale", "is_dynamic"), [("fp16", FIRST, True), ("fp16-true", FIRST, True), ("bf16", 1.0, False)]
)
def test_only_fp16_is_scaled(layout: str, scale: float, is_dynamic: bool) -> None:
    scaler = scaler_of(Plan.from_layout(f"dp=1 {layout}"))
    assert (scaler.scale, scaler.is_dynamic, scaler.is_active) == (scale, is_dynamic, is_dynamic)


def test_unscaling_loses_nothing_that_the_scale_had_saved() -> None:
    tiny = torch.tensor([1e-9, 2e-9], dtype=torch.float64)
    scaled = (tiny * 2**16).half()
    assert unscaled(scaled, 2.0**16).double() == pytest.approx(tiny, rel=1e-2)


def test_a_scale_without_fp16_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        load_config(None, ["memory.loss_scale=1024"])
    what, why, fix = str(caught.value).splitlines()
    assert what.startswith("error: `memory.loss_scale = 1024` without fp16")
    assert "memory.precision is auto" in why and "memory.loss_scale=auto or memory.precision=fp16" in fix
    assert load_config(None, ["memory.loss_scale=1024", "memory.precision=fp16"]).config.memory.loss_scale == 1024


# Where it overflows --------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    def __init__(self, gain: float = 1.0, backward_gain: float = 1.0):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.gain, self.backward_gain = gain, backward_gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(self.first(x) * self.gain)
        if self.backward_gain != 1.0:
            h.register_hook(lambda gradient: gradient * self.backward_gain)
        return self.third(h)


def overflow_of(model: nn.Module) -> str:
    x = torch.ones(2, 4)
    named = list(model.named_parameters())
    found = first_overflow(
        [(0, model)],
        lambda: model(x).sum().backward(),
        lambda: [(name, p.grad) for name, p in named if p.grad is not None],
        torch.device("cpu"),
        1,
    )
    return str(found)


def test_the_first_number_that_is_not_finite_is_named() -> None:
    assert overflow_of(Chain()) == "None"
    assert overflow_of(Chain(gain=float("inf"))) == "what enters second, in forward"
    assert overflow_of(Chain(backward_gain=float("inf"))) == "the gradient of first's output, in backward"
    weights = Chain()
    with torch.no_grad():
        weights.second.weight.fill_(float("inf"))
    assert overflow_of(weights) == "the output of second, in forward"


# Runs ----------------------------------------------------------------------------------------------------------------


def metrics_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_scale_is_in_metrics_and_a_resumed_run_goes_on_with_it(ranks: Any, tmp_path: Path) -> None:
    words = ["memory.precision=fp16", "--nproc", 1, *SMALL]
    done = warm_command(ranks, "train", *words, "train.steps=6", "checkpoint.every=3", "run.name=a", cwd=tmp_path)
    assert done.returncode == Exit.DONE, done.stdout
    run = tmp_path / "runs" / "a"
    manifest = json.loads((run / "checkpoints" / "step-3" / "manifest.json").read_text())
    assert manifest["state"]["loss_scale"] == {"scale": 2.0**16, "good_steps": 3, "skipped_steps": 0}
    # As if it had moved: what goes on is what was saved.
    manifest["state"]["loss_scale"] = {"scale": 2.0**12, "good_steps": 1998, "skipped_steps": 0}
    (run / "checkpoints" / "step-3" / "manifest.json").write_text(sealed(manifest))
    before = losses_of(run)
    done = warm_command(ranks, "resume", run, "--from", 3, cwd=tmp_path)
    assert done.returncode == Exit.DONE, done.stdout
    again = [line for line in metrics_of(run) if "scale" in line][-3:]
    assert [line["scale"] for line in again] == [2.0**12, 2.0**12, 2.0**13]  # doubled after 2000 good steps
    assert losses_of(run)[6] == pytest.approx(before[6], abs=1e-3)


def test_a_run_that_overflows_at_every_scale_stops_and_names_the_layer(ranks: Any, tmp_path: Path) -> None:
    words = ["memory.precision=fp16", "parallel.layout=dp=1 pp=2", *SMALL, "optimizer.warmup=1"]
    words += ["optimizer.name=sgd", "optimizer.lr=3e5", "optimizer.schedule=constant", "train.clip=0", "run.name=b"]
    done = warm_command(ranks, "train", *words, "train.steps=60", "--no-verify", cwd=tmp_path, nproc=2)
    assert done.returncode == Exit.DIVERGED, done.stdout
    what, why, fix = [line for line in done.stdout.splitlines() if line.startswith(("STOPPED", "  why", "  do"))]
    assert "fp16 overflows at every loss scale; committed" in what and "exit 4" in what
    assert "not finite first: " in why and ("layers." in why or "head" in why) and why.endswith(("forward", "backward"))
    assert "memory.precision=bf16 memory.loss_scale=auto" in fix
    run = tmp_path / "runs" / "b"
    lines = [line for line in metrics_of(run) if "scale" in line]
    assert lines[-1]["scale"] == SMALLEST and lines[-1]["skipped"] and not lines[0].get("skipped")
    assert metrics_of(run)[-1]["event"] == "failed" and "not finite" not in metrics_of(run)[-1]["why"]
    assert (run / "checkpoints" / f"step-{lines[-1]['step']}").is_dir()
