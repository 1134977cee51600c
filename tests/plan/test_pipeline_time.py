"""The quick simulation of a pipeline is the slow one."""

from __future__ import annotations

import random

import pytest

from shardwise.plan.prediction.pipeline_time import pipeline_seconds
from shardwise.spec.schedules import schedule_actions, stage_owners
from shardwise.spec.timeline import simulate

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zero-bubble", 1), ("zbv", 2)]


@pytest.mark.parametrize("schedule, stages", SCHEDULES)
@pytest.mark.parametrize("pp, microbatches", [(2, 3), (4, 8), (4, 13), (8, 8)])
def test_it_takes_as_long_as_the_timeline_says(schedule, stages, pp, microbatches):
    draw = random.Random(pp * microbatches)
    prices = [draw.uniform(0.5, 2.0) for _ in range(4 * pp * stages)]
    owners = stage_owners(schedule, pp, stages)
    timeline = simulate(
        schedule_actions(schedule, pp, stages, microbatches),
        owners,
        lambda action: prices[4 * action.stage + "FBIW".index(action.kind)],
        0.25,
    )
    assert pipeline_seconds(schedule, pp, stages, microbatches, tuple(prices), 0.25) == pytest.approx(timeline.total)


@pytest.mark.parametrize("schedule, stages", SCHEDULES)
def test_many_micro_batches_go_on_in_a_line(schedule, stages):
    pp, microbatches = 4, 70
    prices = [1.0, 2.0, 1.0, 1.0] * (pp * stages)
    prices[0] += 0.3
    owners = stage_owners(schedule, pp, stages)
    whole = simulate(
        schedule_actions(schedule, pp, stages, microbatches),
        owners,
        lambda action: prices[4 * action.stage + "FBIW".index(action.kind)],
        0.1,
    )
    total = pipeline_seconds(schedule, pp, stages, microbatches, tuple(prices), 0.1)
    assert total == pytest.approx(whole.total, rel=0.02)


@pytest.mark.parametrize("pp, microbatches, share", [(4, 4, 3 / 7), (4, 16, 3 / 19)])
def test_textbook_bubbles(pp, microbatches, share):
    total = pipeline_seconds("1f1b", pp, 1, microbatches, (1.0, 2.0, 1.0, 1.0) * pp, 0.0)
    assert 1 - 3.0 * microbatches / total == pytest.approx(share)
