"""Held-out forwards in idle slots: as many as there is room for, and nothing else moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.parallel.pipeline.idle_slots import fill_bubbles
from shardwise.spec.actions import Action
from shardwise.spec.schedules import SCHEDULES, schedule_actions, stage_owners
from shardwise.spec.timeline import draw, simulate

UNIT = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0, "E": 1.0}


def unit(action: Action) -> float:
    return UNIT[action.kind]


@pytest.mark.parametrize(
    ("schedule", "stages", "room"), [("gpipe", 1, 6), ("1f1b", 1, 4), ("interleaved", 2, 0), ("zero-bubble", 1, 0)]
)
def test_room_for_held_out_forwards(schedule: str, stages: int, room: int) -> None:
    """4 ranks, 8 micro-batches. In gpipe the last rank idles for 9 units, 3 of them before anything can reach it. In
    zero-bubble all of its idle time is before that; in interleaved its two stages would have to wait for one another
    at the end."""
    actions, owners = schedule_actions(schedule, 4, stages, 8), stage_owners(schedule, 4, stages)
    filled, number = fill_bubbles(actions, owners, unit, most=100)
    assert number == room
    assert simulate(filled, owners, unit).total == simulate(actions, owners, unit).total
    assert fill_bubbles(actions, owners, unit, most=1)[1] == min(1, room)
    assert fill_bubbles(actions, owners, unit, most=0) == (actions, 0)


def test_a_picture() -> None:
    actions, owners = schedule_actions("1f1b", 2, 1, 3), stage_owners("1f1b", 2, 1)
    filled, _ = fill_bubbles(actions, owners, unit, most=9)
    assert draw(simulate(filled, owners, unit), 12) == "rank 0 |01**aa2bb.cc|\nrank 1 |.0aa1bb2cc**|"


def test_no_room_for_what_takes_too_long() -> None:
    actions, owners = schedule_actions("1f1b", 2, 1, 8), stage_owners("1f1b", 2, 1)
    slow = UNIT | {"E": 2.1}
    assert fill_bubbles(actions, owners, lambda action: slow[action.kind], most=9) == (actions, 0)
    assert fill_bubbles(actions, owners, lambda action: slow[action.kind], most=9, longer=1.003) == (actions, 0)
    assert fill_bubbles(actions, owners, lambda action: slow[action.kind], most=9, longer=1.008)[1] == 1  # 0.2 of 27


@settings(max_examples=150)
@given(
    schedule=st.sampled_from(list(SCHEDULES)),
    pp=st.integers(2, 6),
    num_microbatches=st.integers(1, 10),
    seed=st.randoms(use_true_random=False),
    delay=st.sampled_from([0.0, 0.3]),
    longer=st.sampled_from([1.0, 1.05]),
)
def test_training_keeps_its_order_and_its_length(schedule, pp, num_microbatches, seed, delay, longer):
    stages = SCHEDULES[schedule].usual_stages
    actions, owners = schedule_actions(schedule, pp, stages, num_microbatches), stage_owners(schedule, pp, stages)
    prices = {(kind, stage): seed.choice([0.0, 0.5, 1.0, 3.0]) for kind in "FBIW" for stage in range(len(owners))}
    prices |= {("E", stage): seed.choice([0.25, 1.0]) for stage in range(len(owners))}

    def seconds(action: Action) -> float:
        return prices[action.kind, action.stage]

    filled, number = fill_bubbles(actions, owners, seconds, most=20, delay=delay, longer=longer)
    for rank, mine in enumerate(filled):
        assert tuple(action for action in mine if action.kind != "E") == actions[rank]
        held_out = {(action.stage, action.microbatch) for action in mine if action.kind == "E"}
        assert held_out == {(s, m) for s, owner in enumerate(owners) if owner == rank for m in range(number)}
    before, after = simulate(actions, owners, seconds), simulate(filled, owners, seconds)
    assert after.total <= before.total * longer + 1e-9
