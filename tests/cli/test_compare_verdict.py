"""A difference is better or worse only beyond what repetitions differ by."""

from __future__ import annotations

import pytest

from shardwise.cli.compare_verdict import Judged, judge


def run(name: str, loss: float | None, seed: int = 0, lr: float = 1e-3, steps: int = 10, **values: object) -> Judged:
    figures = {"steps": steps, "last loss": loss if loss != loss else 3.0, "held-out loss": loss}
    return Judged(name, {"train.seed": seed, "optimizer.lr": lr, **values}, figures)


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [(2.0, "same"), (2.009, "same"), (1.991, "same"), (2.011, "worse"), (1.98, "better"), (float("nan"), "worse")],
)
def test_the_band_is_what_repetitions_differ_by(loss: float, verdict: str) -> None:
    repeated = run("again", 2.01, seed=1, **{"parallel.dp": 2})
    (found,), band = judge([run("first", 2.0), run("other", loss, lr=1.0)], [repeated])
    assert found["verdict"] == verdict
    if loss == loss:
        assert band.width == pytest.approx(0.01) and band.names == ("first", "again")


@pytest.mark.parametrize(
    "other",
    [run("same seed", 2.5), run("other lr", 2.5, seed=1, lr=2.0), run("longer", 2.5, seed=1, steps=11)],
    ids=lambda one: one.name,
)
def test_what_is_no_repetition_makes_no_band(other: Judged) -> None:
    (found,), band = judge([run("first", 2.0), run("changed", 1.9, lr=3.0)], [other])
    assert band.width is None and "unknown" in band.said
    assert found["verdict"] == "better" and "may be chance" in found["why"]


def test_without_held_out_losses_the_last_ones_are_compared() -> None:
    (found,), band = judge([run("first", None), run("other", None, lr=2.0)], [])
    assert (band.figure, found["verdict"], found["difference"]) == ("last loss", "same", 0.0)
