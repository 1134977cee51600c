"""The stop-watch: how often it calls, and that one bad turn does not count."""

from __future__ import annotations

import time

import torch

from shardwise.kernels.timing import MOST_TURNS, median_seconds

CPU = torch.device("cpu")


def test_actions_take_turns_after_one_call_each() -> None:
    calls: list[str] = []
    actions = [lambda: calls.append("a"), lambda: calls.append("b")]
    found = median_seconds(actions, CPU, turns=2, calls=2, untimed=1)
    assert "".join(calls) == "ab" + 2 * "aaabbb"
    assert len(found) == 2 and min(found) > 0


def test_a_turn_that_met_somebody_else_does_not_count() -> None:
    waits = iter([0.05, 0.001, 0.03, 0.001, 0.001, 0.03, 0.001])  # the first one warms up
    (seconds,) = median_seconds([lambda: time.sleep(next(waits))], CPU, turns=5)
    assert 0.001 <= seconds < 0.03


def test_more_turns_as_long_as_there_is_time() -> None:
    calls: list[int] = []
    median_seconds([lambda: calls.append(0)], CPU, turns=3, budget_s=5.0)
    assert len(calls) == 1 + MOST_TURNS
