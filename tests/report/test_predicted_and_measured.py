"""Predicted beside measured: every part has a row, rows add up to the step, odd steps do not count."""

from __future__ import annotations

import pytest

from shardwise.report.memory import ROWS as MEMORY
from shardwise.report.predicted_and_measured import ROWS, compare, comparison_lines, short_lines
from shardwise.run.measured_steps import typical
from shardwise.spec.prediction import Prediction

PARTS = ("compute", "recompute", "bubble", "data-parallel", "tensor-parallel", "context-parallel", "expert-parallel",
         "pipeline", "optimizer", "offload", "straggler", "launch")  # fmt: skip
PREDICTION = Prediction({"weights": 1}, {part: 0.01 * (1 + n) for n, part in enumerate(PARTS)})


def step(seconds: float = 1.0) -> dict[str, float]:
    shares = {"compute": 0.6, "comm_exposed": 0.1, "bubble": 0.1, "optimizer": 0.1, "data_wait": 0.04, "other": 0.06}
    return {f"{kind}_s": share * seconds for kind, share in shares.items()} | {"step_s": seconds}


def test_every_part_answers_to_one_row():
    named = [part for _, parts in ROWS.values() for part in parts]
    assert sorted(named) == sorted(PARTS)


def test_rows_add_up_to_the_step_on_both_sides():
    rows = compare(PREDICTION, [step()], None, 18)["step"]
    for side in ("predicted", "measured"):
        assert sum(row[side] for name, row in rows.items() if name != "step") == pytest.approx(rows["step"][side])
    assert rows["step"] == {"predicted": pytest.approx(PREDICTION.step_s), "measured": 1.0}


def test_a_part_without_a_row_is_not_lost():
    rows = compare(Prediction({}, {"compute": 0.5, "something new": 0.25}), [step()], None, 1)["step"]
    assert rows["other"]["predicted"] == 0.25


def test_the_rank_that_computes_longest_is_the_one_that_is_predicted():
    slow = step() | {"compute_s": 0.65, "comm_exposed_s": 0.05}
    assert compare(PREDICTION, [step(), slow, step()], None, 1)["rank"] == 1


def test_a_disturbed_step_does_not_count():
    steps = [step(1.0)] * 6 + [step(30.0), step(0.01)]
    assert typical(steps)["step_s"] == pytest.approx(1.0)
    assert typical([step(2.0)])["compute_s"] == pytest.approx(1.2)


def test_the_table_leaves_out_what_is_nothing():
    prediction = Prediction({}, {"compute": 0.5, "optimizer": 0.1})
    measured = step() | {"bubble_s": 0.0, "data_wait_s": 1e-4}
    lines = comparison_lines(compare(prediction, [measured], None, 18))
    assert lines[0].split() == ["time", "rank", "0,", "18", "steps", "predicted", "measured"]
    names = [line[9:31].strip() for line in lines[1:]]
    assert names == ["in the model", "waiting for ranks", "optimizer", "other", "step"]
    assert lines[1].split()[-6:] == ["500", "ms", "600", "ms", "+20", "%"]


def test_a_run_of_one_step_has_nothing_to_compare():
    found = compare(PREDICTION, [], None, 0)
    assert found["step"] == {} and comparison_lines(found) == [] and short_lines(found) == []


def test_during_a_run_time_and_memory_are_a_line_each():
    found = compare(Prediction({}, {"compute": 0.4, "optimizer": 0.1}), [step()], None, 18)
    predicted = {row: 0 for row in MEMORY} | {"parameters": 2**20, "peak": 4 * 2**20}
    found["memory"] = {"predicted": predicted, "fullest": predicted | {"rank": 0, "reserved": 2**20, "peak": 5 * 2**20}}
    assert short_lines(found) == [
        "time     1.00 s, predicted 500 ms (+100 %); furthest off: in the model, 600 ms, predicted 400 ms",
        "memory   5.0 MiB, predicted 4.0 MiB (+25 %); furthest off: reserved, 1.0 MiB, predicted 0 B",
    ]
