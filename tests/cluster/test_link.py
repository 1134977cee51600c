"""The line through measured times, and real times of two real processes."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.cluster.measure.link import LinkFit, fit_line, loopback_interface, measure_local_link


@given(st.floats(1e-6, 1e-3), st.floats(1e-11, 1e-8))
def test_an_exact_line_is_found(alpha, beta):
    points = [(size, alpha + beta * size) for size in (4, 4096, 2**20, 2**24)]
    assert fit_line(points) == pytest.approx((alpha, beta), rel=1e-6)


def test_neither_number_is_negative():
    assert fit_line([(1, 2.0), (2, 1.0)])[1] == 0.0
    alpha, beta = fit_line([(1, 0.1), (2, 10.0)])
    assert alpha == 0.0 and beta > 0


def test_a_noisy_long_message_does_not_decide_what_short_ones_cost():
    points = [(size, 1e-4 + 1e-9 * size) for size in (4, 4096, 65536, 2**20)] + [(2**24, 1.5 * 2**24 * 1e-9)]
    assert fit_line(points)[0] == pytest.approx(1e-4, rel=0.1)


def test_two_real_processes():
    fit = measure_local_link(sizes=(4, 2**16, 2**20))
    assert isinstance(fit, LinkFit)
    assert [size for size, _ in fit.points] == [4, 2**16, 2**20]
    assert all(seconds > 0 for _, seconds in fit.points)
    assert fit.alpha_s >= 0 and fit.beta_s_per_byte >= 0


@pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="interfaces have other names there")
def test_loopback_has_a_name_here():
    assert loopback_interface() == {"linux": "lo", "darwin": "lo0"}[sys.platform]
