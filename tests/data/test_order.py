"""The order of samples is arithmetic: bijections, exact shares, nothing remembered."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.data.order import BLOCK, combine, mix64, mixture, permute, slots_of

seeds = st.integers(0, 2**64 - 1)


@given(size=st.integers(1, 3000), seed=seeds)
def test_permute_visits_every_position_exactly_once(size, seed):
    order = permute(np.arange(size), size, np.array(mix64(np.array([seed], dtype=np.uint64), 0)))
    assert sorted(order.tolist()) == list(range(size))


@given(size=st.integers(1, 10**12), seed=seeds, data=st.data())
def test_permute_of_one_position_does_not_depend_on_its_company(size, seed, data):
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20)))
    keys = np.array([seed], dtype=np.uint64)
    together = permute(positions, size, keys)
    assert together.max() < size
    assert [permute(positions[i : i + 1], size, keys)[0] for i in range(len(positions))] == together.tolist()


def test_another_key_is_another_order():
    one, other = (permute(np.arange(1000), 1000, np.array([key], dtype=np.uint64)) for key in (1, 2))
    assert (one == other).mean() < 0.02
    assert combine(1, 2) != combine(2, 1)


def test_permutation_does_not_follow_the_input():
    order = permute(np.arange(10_000), 10_000, np.array([5], dtype=np.uint64))
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


@given(weights=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=20))
def test_slots_fill_a_block_in_proportion(weights):
    slots = slots_of(weights)
    assert slots.sum() == BLOCK and slots.min() >= 1
    assert np.abs(slots / BLOCK - np.array(weights) / sum(weights)).max() < 25 / BLOCK


@pytest.mark.parametrize("start", [0, BLOCK * 3])
def test_mixture_numbers_each_sources_samples_without_gap_or_repeat(start):
    slots = slots_of([0.7, 0.2, 0.1])
    source, number = mixture(np.arange(start, start + 2 * BLOCK), slots, seed=3)
    for k in range(3):
        first = start // BLOCK * slots[k]
        assert sorted(number[source == k].tolist()) == list(range(first, first + 2 * slots[k]))


def test_mixture_keeps_its_proportions_in_short_stretches():
    source, _ = mixture(np.arange(5000), slots_of([3, 1]), seed=0)
    assert abs((source == 0).mean() - 0.75) < 0.03
