"""Lower bounds follow the prices they bound: whatever price is changed, no bound is above the prediction, and the
bounds move with it."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from shardwise.cluster.describe.read import read_cluster
from shardwise.plan.layouts.best_first import BestFirst
from shardwise.plan.layouts.parts import Grid, Pace, Saving, States
from shardwise.plan.layouts.space import Space
from shardwise.plan.prediction import lifetimes, state_time, states, step_time
from shardwise.plan.prediction.collectives import Network
from shardwise.plan.prediction.kernels import Pricer
from shardwise.plan.prediction.predict import predict
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.presets import preset

Layout = tuple[Grid, Pace, States, Saving]
NAMES = count()


def scaled(value: Any, factor: float) -> Any:
    """A number, a table or a list of numbers, or a function that returns one, times a factor."""
    if callable(value):
        return lambda *args, **named: factor * value(*args, **named)
    if isinstance(value, dict):
        return {key: scaled(one, factor) for key, one in value.items()}
    return max(1, int(factor * value)) if isinstance(value, int) else factor * value  # bytes are whole


PRICES: dict[str, tuple[object, str]] = {
    "seconds of a kernel": (Pricer, "seconds"),
    "seconds of the host": (Pricer, "host_seconds"),
    "passes over memory": (Pricer, "pass_"),
    "all-gather": (Network, "all_gather"),
    "reduce-scatter": (Network, "reduce_scatter"),
    "all-reduce": (Network, "all_reduce"),
    "all-to-all": (Network, "all_to_all"),
    "send": (Network, "send"),
    "stragglers": (step_time, "STRAGGLER"),
    "collectives beside computing": (state_time, "SLOWED"),
    "update": (state_time, "OPTIMIZER_RATE"),
    "link to the host": (state_time, "HOST_LINK"),
    "CPU memory": (state_time, "CPU_MEMORY"),
    "bytes of a weight": (states, "WEIGHT_BYTES"),
    "bytes of optimizer state": (states, "STATE_BYTES"),
    "states per parameter": (states, "state_bytes"),
    "bytes of an activation": (lifetimes, "COMPUTE_BYTES"),
}
MOVES_MEMORY = (
    "bytes of a weight",
    "bytes of optimizer state",
    "optimizer state per parameter",
    "bytes of an activation",
)


def question(seed: int) -> Space:
    """A cluster with a name of its own each time: prices are kept by it."""
    draw = random.Random(seed)
    hidden = draw.choice([1024, 4096])
    shape = draw.choice([{}, {"num_experts": 4, "experts_per_token": 2, "expert_ffn": 256, "first_dense_layers": 1}])
    model = ModelSpec(num_layers=8, hidden=hidden, num_heads=8, num_kv_heads=4, ffn=3 * hidden, vocab=32000)
    cluster = read_cluster(draw.choice(["2x4xh100", "1x4xl40s", "4x2xa100-80:nic=5GB/s"]))
    named = replace(cluster, name=str(next(NAMES)))
    return Space(replace(model, **shape), named, Job(draw.choice([1024, 8192]), draw.choice([16, 24])), {})


def some(space: Space, count: int, seed: int) -> list[Layout]:
    draw, found, grids = random.Random(seed), [], list(space.some_grids())
    while len(found) < count:
        grid = draw.choice(grids)
        states_of, saving = draw.choice(space.states(grid)), draw.choice(space.savings)
        if space.go_together(grid, states_of, saving.offload, saving.activation_offload):
            found.append((grid, draw.choice(list(space.paces(grid))), states_of, saving))
    return found


def bounds(engine: BestFirst, layout: Layout) -> tuple[list[float], list[float]]:
    """Of every region that a layout is in, from large to small: seconds, and bytes."""
    (grid, pace, states_of, saving), time, memory = layout, engine.time, engine.memory
    size = pace.micro_batch
    sharing = time.of_states(grid, size, states_of, saving.offload)
    weights = memory.of_grid(grid, size, states_of, saving.offload)
    seconds = [
        time.of_grid(grid),
        time.of_size(grid, size),
        time.of_saving(grid, size, saving, sharing),
        time.courses(grid, pace.micro_batch, saving.recompute)[pace].bound(sharing),
        time.of_plan(engine.space.plan(*layout)),
    ]
    return seconds, [weights.beside(0.0), memory.of_layout(*layout)]


def hold(seed: int, count: int) -> tuple[list[float], list[float]]:
    """All bounds of some layouts, each of which is at most what is predicted."""
    space = question(seed)
    engine = BestFirst(space, 2**50)
    found: tuple[list[float], list[float]] = ([], [])
    for layout in some(space, count, seed):
        plan = space.plan(*layout)
        predicted = predict(space.model, space.cluster, space.job, plan)
        seconds, sizes = bounds(engine, layout)
        assert max(seconds) <= predicted.step_s * (1 + 1e-9), (plan.layout, seconds, predicted.step_s)
        assert max(sizes) <= predicted.memory_bytes + 1, (plan.layout, sizes, predicted.memory_bytes)
        found[0].extend(seconds)
        found[1].extend(sizes)
    return found


@pytest.mark.parametrize("name", PRICES)
def test_bounds_follow_every_price(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute = PRICES[name]
    usual, part, moved = [hold(seed, 12) for seed in range(3)], int(name in MOVES_MEMORY), False
    for factor in (0.25, 4):
        with monkeypatch.context() as patch:
            value = getattr(where, attribute)
            patch.setattr(where, attribute, scaled(value, factor))
            for module in (step_time, state_time, lifetimes, states):
                if getattr(module, attribute, None) is value:  # where it was imported by name
                    patch.setattr(module, attribute, getattr(where, attribute))
            moved |= any(hold(seed, 12)[part] != usual[seed][part] for seed in range(3))
    assert moved, "no bound follows this price"


def test_fewer_ranks_on_a_cpu_have_more_threads_each():
    """What was asked before says nothing about another number of ranks."""
    space = Space(preset("tiny"), read_cluster("4xcpu"), Job(512, 8, precision="fp32"), {})
    engine = BestFirst(space, 2**50)
    for layout in some(space, 40, 1):
        predicted = predict(space.model, space.cluster, space.job, space.plan(*layout))
        assert max(bounds(engine, layout)[0]) <= predicted.step_s * (1 + 1e-9), layout


def test_no_bound_of_any_region_is_above_the_prediction():
    for seed in range(12):
        hold(seed, 25)
