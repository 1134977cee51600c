"""The simulator against times one can compute by hand, and its picture."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.actions import Action
from shardwise.spec.schedules import schedule_actions, stage_owners
from shardwise.spec.timeline import Timed, Timeline, draw, peak_in_flight, simulate

UNIT = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}


def timeline(schedule: str, pp: int, v: int, m: int, transfer: float = 0.0, unit: dict[str, float] = UNIT) -> Timeline:
    actions, owners = schedule_actions(schedule, pp, v, m), stage_owners(schedule, pp, v)
    return simulate(actions, owners, lambda action: unit[action.kind], transfer)


def test_start_and_end_of_every_action():
    assert timeline("1f1b", 2, 1, 2, transfer=0.5).ranks == (
        (
            Timed(Action("F", 0, 0), 0.0, 1.0),
            Timed(Action("F", 0, 1), 1.0, 2.0),
            Timed(Action("B", 0, 0), 5.0, 7.0),  # waits for the gradient that left at 4.5
            Timed(Action("B", 0, 1), 8.0, 10.0),
        ),
        (
            Timed(Action("F", 1, 0), 1.5, 2.5),
            Timed(Action("B", 1, 0), 2.5, 4.5),
            Timed(Action("F", 1, 1), 4.5, 5.5),
            Timed(Action("B", 1, 1), 5.5, 7.5),
        ),
    )


def test_busy_and_bubble():
    times = timeline("1f1b", 4, 1, 8)
    assert times.total == 3 * (8 + 3)
    assert times.busy == (24.0,) * 4
    assert times.bubble == (9.0,) * 4
    assert times.bubble_fraction == pytest.approx(3 / 11)


def test_a_slow_stage_sets_the_pace():
    actions, owners = schedule_actions("1f1b", 3, 1, 10), stage_owners("1f1b", 3, 1)
    slow = simulate(actions, owners, lambda action: UNIT[action.kind] * (5 if action.stage == 1 else 1))
    # The slow one never waits between its first and last action: a forward comes before, a backward after.
    assert slow.total == 1 + 10 * 15 + 2
    assert slow.busy == (30.0, 150.0, 30.0)
    assert slow.bubble_fraction == pytest.approx(1 - 210 / (3 * slow.total))


@pytest.mark.parametrize("schedule, v, messages", [("1f1b", 1, 2 * 3), ("interleaved", 2, 2 * 7), ("zbv", 2, 2 * 6)])
def test_only_messages_between_ranks_take_time(schedule, v, messages):
    """One micro-batch on 4 ranks. In the V the two middle stages are on one rank."""
    gained = timeline(schedule, 4, v, 1, transfer=0.5).total - timeline(schedule, 4, v, 1).total
    assert gained == pytest.approx(0.5 * messages)


def test_computing_hides_messages_in_gpipe():
    assert timeline("gpipe", 4, 1, 16, transfer=0.5).total == timeline("gpipe", 4, 1, 16).total + 2 * 3 * 0.5


@settings(max_examples=60)
@given(
    kind=st.sampled_from(
        [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zero-bubble", 2), ("zbv", 2)]
    ),
    pp=st.integers(1, 6),
    m=st.integers(1, 12),
    transfer=st.floats(0, 3),
    costs=st.tuples(*[st.floats(0.1, 5)] * 3),
)
def test_a_rank_does_one_thing_at_a_time_and_waits_for_what_it_needs(kind, pp, m, transfer, costs):
    schedule, v = kind
    unit = dict(zip("FIW", costs)) | {"B": costs[1] + costs[2]}
    times = timeline(schedule, pp, v, m, transfer, unit)
    owners = stage_owners(schedule, pp, v)
    at = {timed.action: timed for mine in times.ranks for timed in mine}
    for mine in times.ranks:
        assert all(a.end <= b.start for a, b in pairwise(mine))
    for action, (_, start, _) in at.items():
        above = action.stage - 1 if action.kind == "F" else action.stage + 1
        if action.kind != "W" and 0 <= above < len(owners):
            travels = transfer if owners[above] != owners[action.stage] else 0.0
            assert start >= at[action._replace(stage=above)].end + travels
    assert times.total == max(timed.end for timed in at.values())
    assert 0 <= times.bubble_fraction < 1
    assert times.total >= m * v * sum(costs) - 1e-9


def test_an_activation_is_held_until_its_weights_are_done():
    f0, f1, i0, w0, b1 = (Action(*a) for a in [("F", 0, 0), ("F", 0, 1), ("I", 0, 0), ("W", 0, 0), ("B", 0, 1)])
    assert peak_in_flight([[f0, i0, f1, w0, b1], [f0, i0, w0, f1, b1]]) == (2, 1)


def test_deadlock_is_an_error_not_a_time():
    with pytest.raises(AssertionError, match="deadlock"):
        simulate([[Action("F", 1, 0), Action("F", 0, 0)]], (0, 0), lambda action: 1.0)


def test_no_time_is_no_bubble():
    assert timeline("1f1b", 2, 1, 1, unit=dict.fromkeys("FBIW", 0.0)).bubble_fraction == 0.0


def test_picture():
    assert draw(timeline("1f1b", 2, 1, 3), width=12).splitlines() == [
        "rank 0 |01..aa2bb.cc|",
        "rank 1 |.0aa1bb2cc..|",
    ]
    assert draw(timeline("zero-bubble", 2, 1, 2), width=14).splitlines() == [
        "rank 0 |0011..aaAAbbBB|",
        "rank 1 |..00aa11bbAABB|",
    ]
    twelve = draw(timeline("gpipe", 11, 1, 12), width=66).splitlines()
    assert twelve[0].startswith("rank  0 |012345678901") and twelve[10].startswith("rank 10 |..........01")
    assert len({len(line) for line in twelve}) == 1
