"""Splits against brute force: every way to cut a few layers into stages."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.spec.presets import preset
from shardwise.spec.split import balanced_split, estimated_costs, even_split


def every_split(num_layers: int, num_stages: int):
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(end - begin for begin, end in pairwise((0, *cuts, num_layers)))


def stage_costs(split, layers, first, last):
    bounds = [sum(split[:stage]) for stage in range(len(split) + 1)]
    costs = [sum(layers[begin:end]) for begin, end in pairwise(bounds)]
    costs[0] += first
    costs[-1] += last
    return costs


@st.composite
def problems(draw):
    layers = draw(st.lists(st.integers(0, 12), min_size=1, max_size=9))
    first, last = draw(st.integers(0, 15)), draw(st.integers(0, 40))
    return layers, first, last, draw(st.integers(1, len(layers)))


@settings(max_examples=300)
@given(problems())
def test_no_other_split_is_better(problem):
    """The slowest stage first, then evenness, then more layers in front. Whole numbers, so that ties are real ties."""
    layers, first, last, num_stages = problem
    found = balanced_split(layers, first, last, num_stages)

    def rank(split):
        costs = stage_costs(split, layers, first, last)
        return max(costs), sum(cost * cost for cost in costs), [-n for n in split]

    assert found == min(every_split(len(layers), num_stages), key=rank)


@settings(max_examples=100)
@given(st.lists(st.floats(1e-4, 10.0), min_size=2, max_size=9), st.floats(0, 20), st.floats(0, 20), st.data())
def test_measured_seconds_give_the_smallest_maximum_too(layers, first, last, data):
    num_stages = data.draw(st.integers(1, len(layers)))
    found = balanced_split(layers, first, last, num_stages)
    assert sum(found) == len(layers) and min(found) >= 1
    best = min(max(stage_costs(split, layers, first, last)) for split in every_split(len(layers), num_stages))
    assert max(stage_costs(found, layers, first, last)) == pytest.approx(best, rel=1e-8)


def test_a_heavy_head_gets_fewer_layers():
    assert balanced_split([1.0] * 8, 0.0, 2.0, 2) == (5, 3)
    assert balanced_split([1.0] * 8, 3.0, 0.0, 2) == (3, 5)  # 6 and 5
    assert balanced_split([1.0] * 6, 0.0, 0.1, 4) == even_split(6, 4) == (2, 2, 1, 1)
    assert balanced_split([1.0, 1.0, 5.0, 1.0], 0.0, 0.0, 2) == (2, 2)


@pytest.mark.parametrize("num_layers, num_stages", [(1, 1), (6, 4), (7, 7), (80, 16), (61, 16)])
def test_an_even_split_differs_by_one_at_most(num_layers, num_stages):
    split = even_split(num_layers, num_stages)
    assert sum(split) == num_layers and len(split) == num_stages
    assert list(split) == sorted(split, reverse=True) and split[0] - split[-1] <= 1


def test_more_stages_than_layers_is_a_callers_mistake():
    with pytest.raises(AssertionError):
        even_split(3, 4)
    with pytest.raises(AssertionError):
        balanced_split([1.0] * 3, 0.0, 0.0, 4)


@pytest.mark.parametrize("name", ["tiny", "tiny-moe", "gpt2", "llama3-8b", "gemma2-2b", "mistral-7b", "deepseek-v3"])
@pytest.mark.parametrize("seq_len", [128, 8192])
def test_the_estimated_costs_are_the_models_flops(name, seq_len):
    spec = preset(name)
    layers, first, last = estimated_costs(spec, seq_len)
    assert len(layers) == spec.num_layers
    assert sum(layers) + first + last == pytest.approx(spec.flops_per_token(seq_len), rel=1e-12)


def test_dense_and_expert_layers_cost_what_they_compute():
    layers, _, _ = estimated_costs(preset("tiny-moe"), 128)
    assert layers[0] == layers[2] == layers[4] < layers[1] == layers[3] == layers[5]
