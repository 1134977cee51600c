"""Lines through collectives of several numbers of ranks, and real ones of real processes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster.describe.machine import Gpu, Machine
from shardwise.cluster.describe.table import known_cluster
from shardwise.cluster.measure.collectives import (
    CollectiveTime,
    fit,
    fit_collectives,
    measure_collectives,
    with_collectives,
    worlds_of,
)


@given(st.floats(1e-6, 1e-3), st.floats(1e8, 1e12))
def test_one_line_fits_all_numbers_of_ranks(alpha, rate):
    points = []
    for name, times in (("all-reduce", 2), ("all-gather", 1)):
        for ranks in (2, 3, 8):
            for size in (4096, 2**20, 2**26):
                steps = times * (ranks - 1)
                points.append(CollectiveTime(name, ranks, size, steps * alpha + steps / ranks * size / rate))
    found = fit_collectives(points)
    assert set(found) == {"all-reduce", "all-gather"}
    for line in (*found.values(), fit(points)):
        assert (line.alpha, line.rate) == pytest.approx((alpha, rate), rel=1e-6)
    assert found["all-reduce"].seconds(points[0]) == pytest.approx(points[0].seconds)
    link = with_collectives(known_cluster("h100", 1, 8), points).tiers[0]
    assert (link.alpha, link.rate(8)) == pytest.approx((alpha, rate), rel=1e-6)


def test_numbers_of_ranks():
    card = Gpu("NVIDIA H200", 150 * 10**9, (9, 0))
    assert worlds_of(Machine(6, 2**33, (), "linux")) == (2, 4, 6)
    assert worlds_of(Machine(2, 2**33, (), "linux")) == (2,)
    assert worlds_of(Machine(1, 2**33, (), "linux")) == ()
    assert worlds_of(Machine(64, 2**33, (card,) * 8, "linux")) == (2, 4, 8)


def test_two_real_processes_time_every_collective():
    points = measure_collectives((2,), "gloo")
    assert {point.collective for point in points} == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
    assert all(point.seconds > 0 and point.ranks == 2 for point in points)
    for name in ("all-reduce", "all-gather"):
        mine = [point for point in points if point.collective == name]
        assert max(mine, key=lambda point: point.size).seconds > min(mine, key=lambda point: point.size).seconds
