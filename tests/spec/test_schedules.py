"""Schedules: exact small lists, the promise that makes each one what it is, and lists that the check must refuse."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.actions import Action, check_actions, in_order
from shardwise.spec.schedules import SCHEDULES, schedule_actions, splits_backward, stage_owners
from shardwise.spec.timeline import peak_in_flight, simulate

KINDS = [(name, v) for name, schedule in SCHEDULES.items() for v in (1, 2, 3, 4) if schedule.takes_stages(v)]


def parse(text: str) -> tuple[Action, ...]:
    """`F2.0` is the forward of stage 2 for micro-batch 0."""
    return tuple(Action(word[0], *map(int, word[1:].split("."))) for word in text.split())


def unit_time(action: Action) -> float:
    return 2.0 if action.kind == "B" else 1.0


def total_time(schedule: str, pp: int, v: int, num_microbatches: int) -> float:
    actions = schedule_actions(schedule, pp, v, num_microbatches)
    return simulate(actions, stage_owners(schedule, pp, v), unit_time).total


BY_HAND = {
    ("gpipe", 2, 1, 3): ("F0.0 F0.1 F0.2 B0.0 B0.1 B0.2", "F1.0 F1.1 F1.2 B1.0 B1.1 B1.2"),
    ("1f1b", 1, 1, 3): ("F0.0 B0.0 F0.1 B0.1 F0.2 B0.2",),
    ("1f1b", 3, 1, 4): (
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
        "F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
    ),
    ("1f1b", 3, 1, 1): ("F0.0 B0.0", "F1.0 B1.0", "F2.0 B2.0"),
    ("interleaved", 1, 2, 2): ("F0.0 F1.0 B1.0 F0.1 B0.0 F1.1 B1.1 B0.1",),
    ("interleaved", 2, 2, 4): (
        "F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 B2.2 B2.3 B0.2 B0.3",
        "F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 B3.3 B1.2 B1.3",
    ),
    ("zero-bubble", 2, 1, 3): (
        "F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ),
    ("zbv", 1, 2, 2): ("F0.0 F1.0 I1.0 W1.0 F0.1 I0.0 W0.0 F1.1 I1.1 I0.1 W1.1 W0.1",),
}  # fmt: skip


@pytest.mark.parametrize("arguments", BY_HAND, ids=str)
def test_lists_written_by_hand(arguments):
    assert schedule_actions(*arguments) == tuple(parse(text) for text in BY_HAND[arguments])


def test_owners_go_round_and_the_v_turns():
    assert stage_owners("1f1b", 4, 1) == (0, 1, 2, 3)
    assert stage_owners("interleaved", 2, 3) == (0, 1, 0, 1, 0, 1)
    assert stage_owners("zbv", 3, 2) == (0, 1, 2, 2, 1, 0)


@settings(max_examples=120)
@given(kind=st.sampled_from(KINDS), pp=st.integers(1, 16), num_microbatches=st.integers(1, 40))
def test_every_schedule_works_with_any_number_of_micro_batches(kind, pp, num_microbatches):
    schedule, v = kind
    actions, owners = schedule_actions(schedule, pp, v, num_microbatches), stage_owners(schedule, pp, v)
    check_actions(actions, owners, num_microbatches)
    kinds = {action.kind for mine in actions for action in mine}
    assert kinds - {"B"} == ({"F", "I", "W"} if splits_backward(schedule) else {"F"})
    timeline = simulate(actions, owners, unit_time, transfer=0.25)
    assert timeline.busy == (3.0 * v * num_microbatches,) * pp


@pytest.mark.parametrize("schedule, v", [kind for kind in KINDS if not splits_backward(kind[0])])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_whole_backward_leaves_the_published_bubble(schedule, v, pp):
    for m in range(1, 3 * pp + 2):
        # M >= pp: pp - 1 rounds of F and B per rank are lost. Fewer: one wave through all stages and back.
        rounds = v * m + pp - 1 if m >= pp else v * pp + m - 1
        assert total_time(schedule, pp, v, m) == 3 * rounds
    ideal = 3 * v * m
    assert (total_time(schedule, pp, v, m) - ideal) / ideal == pytest.approx((pp - 1) / (v * m))


@pytest.mark.parametrize("schedule, v", [kind for kind in KINDS if splits_backward(kind[0])])
@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_split_backward_leaves_only_the_way_to_the_last_rank(schedule, v, pp):
    """pp - 1 units: the last rank cannot start before, so less is not possible. In 1f1b it is 3 (pp - 1)."""
    for m in range(pp, 3 * pp + 2):
        assert total_time(schedule, pp, v, m) == 3 * v * m + pp - 1


@pytest.mark.parametrize("pp", [2, 5, 8])
def test_zero_bubble_has_a_third_of_the_bubble_and_the_peak_of_1f1b(pp):
    for m in range(pp, 3 * pp):
        lost, lost_1f1b = (total_time(schedule, pp, 1, m) - 3 * m for schedule in ("zero-bubble", "1f1b"))
        assert 3 * lost == lost_1f1b
    for m in range(1, 3 * pp):
        peaks, peaks_1f1b = (peak_in_flight(schedule_actions(name, pp, 1, m)) for name in ("zero-bubble", "1f1b"))
        assert max(peaks) == max(peaks_1f1b) == min(m, pp)


@pytest.mark.parametrize("pp", [1, 2, 4, 7])
def test_zbv_never_waits_and_holds_what_1f1b_holds(pp):
    for m in range(1, 4 * pp):
        halves = peak_in_flight(schedule_actions("zbv", pp, 2, m))
        assert max(halves) <= 2 * max(peak_in_flight(schedule_actions("1f1b", pp, 1, m)))
    owners = stage_owners("zbv", pp, 2)
    for m in range(2 * pp - 1, 4 * pp):
        for timed in simulate(schedule_actions("zbv", pp, 2, m), owners, unit_time).ranks:
            assert timed[-1].end - timed[0].start == 6 * m


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 8])
def test_dualpipev_takes_as_long_as_zbv_with_few_split_backwards(pp):
    """Its authors' figures: one activation more than the 2 pp of a V, and a split backward only where a rank would
    wait."""
    for m in range(2 * pp, 4 * pp):
        actions = schedule_actions("dualpipev", pp, 2, m)
        assert total_time("dualpipev", pp, 2, m) == total_time("zbv", pp, 2, m)
        assert peak_in_flight(actions) == (2 * pp + 1,) * pp
        assert sum(action.kind == "I" for action in actions[0]) == 2 * pp - 1


@pytest.mark.parametrize("pp", [1, 3, 4])
@pytest.mark.parametrize("m", [1, 2, 4, 7, 12])
def test_what_each_rank_holds(pp, m):
    assert peak_in_flight(schedule_actions("gpipe", pp, 1, m)) == (m,) * pp
    assert peak_in_flight(schedule_actions("1f1b", pp, 1, m)) == tuple(min(m, pp - rank) for rank in range(pp))
    for v in (2, 3):
        group = -(-m // max(1, m // pp))
        interleaved = tuple(min(v * m, (v - 1) * group + 2 * (pp - 1 - rank) + 1) for rank in range(pp))
        assert peak_in_flight(schedule_actions("interleaved", pp, v, m)) == interleaved
        zero_bubble = min(v * m, (v - 1) * group + pp)
        assert peak_in_flight(schedule_actions("zero-bubble", pp, v, m)) == (zero_bubble,) * pp


@pytest.mark.parametrize(
    "schedule, v", [("gpipe", 1), ("1f1b", 1), ("interleaved", 4), ("zero-bubble", 4), ("zbv", 2), ("dualpipev", 2)]
)
def test_a_large_schedule_is_made_in_well_under_a_second(schedule, v):
    schedule_actions.cache_clear()
    before = time.process_time()
    schedule_actions(schedule, 16, v, 128)
    assert time.process_time() - before < 1.0


GOOD = ("F0.0 F0.1 B0.0 B0.1", "F1.0 I1.0 W1.0 F1.1 B1.1")


@pytest.mark.parametrize(
    "lists, message",
    [
        (GOOD[:1], "1 lists for 2 ranks"),
        (("F0.0 F0.1 B0.0", GOOD[1]), "stage 0 runs F for micro-batch 1: not F B, not F I W"),
        ((GOOD[0], "F1.0 B1.0"), "stage 1 runs nothing for micro-batch 1"),
        ((GOOD[0], "F1.0 I1.0 F1.1 B1.1"), "stage 1 runs F I for micro-batch 0"),
        (("F0.0 F0.0 F0.1 B0.0 B0.1", GOOD[1]), r"rank 0 runs F\(stage 0, micro-batch 0\) after F"),
        (("F0.0 F0.1 B0.0 B0.1 W0.1", GOOD[1]), r"rank 0 runs W\(stage 0, micro-batch 1\) after F B"),
        (("B0.0 F0.0 F0.1 B0.1", GOOD[1]), r"rank 0 runs B\(stage 0, micro-batch 0\) after nothing"),
        ((GOOD[0], "F1.0 W1.0 I1.0 F1.1 B1.1"), r"rank 1 runs W\(stage 1, micro-batch 0\) after F"),
        ((GOOD[0] + " F1.0", "B1.0 F1.1 B1.1"), r"rank 0 runs F\(stage 1, micro-batch 0\), which belongs to rank 1"),
        ((GOOD[0] + " F0.2", GOOD[1]), r"rank 0 runs F\(stage 0, micro-batch 2\): there is no such"),
        ((GOOD[0] + " F2.0", GOOD[1]), r"rank 0 runs F\(stage 2, micro-batch 0\): there is no such"),
    ],
)
def test_the_check_says_what_is_wrong(lists, message):
    with pytest.raises(AssertionError, match=message):
        check_actions([parse(text) for text in lists], (0, 1), 2)


def test_the_check_finds_ranks_that_wait_for_each_other():
    check_actions([parse(text) for text in GOOD], (0, 1), 2)
    crossed = [parse("F0.0 B0.0 F0.1 B0.1"), parse("F1.1 B1.1 F1.0 B1.0")]
    message = (
        r"deadlock: rank 0 waits with B\(stage 0, micro-batch 0\) for I\(stage 1, micro-batch 0\); "
        r"rank 1 waits with F\(stage 1, micro-batch 1\) for F\(stage 0, micro-batch 1\)"
    )
    with pytest.raises(AssertionError, match=message):
        check_actions(crossed, (0, 1), 2)


def test_in_order_keeps_each_list_and_every_need():
    actions = schedule_actions("zbv", 3, 2, 4)
    order = list(in_order(actions, 6))
    assert tuple(tuple(action for rank, action in order if rank == r) for r in range(3)) == actions
    at = {action: place for place, (_, action) in enumerate(order)}
    for kind, stage, m in at:
        if kind == "F" and stage > 0:
            assert at[Action("F", stage - 1, m)] < at[Action("F", stage, m)]
        if kind == "I" and stage < 5:
            assert at[Action("I", stage + 1, m)] < at[Action("I", stage, m)]


@pytest.mark.parametrize(
    "arguments", [("2f2b", 2, 1, 1), ("1f1b", 2, 2, 1), ("interleaved", 2, 1, 1), ("zbv", 2, 1, 1), ("gpipe", 2, 1, 0)]
)
def test_what_is_no_schedule_is_refused(arguments):
    with pytest.raises(AssertionError):
        schedule_actions(*arguments)
