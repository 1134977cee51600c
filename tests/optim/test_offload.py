"""Optimizers in CPU memory and on a disk: the same training as the plain run, what moves, and checkpoints between all
of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardwise.optim.build import build_optimizer
from shardwise.optim.offload.buffer import Disk
from shardwise.optim.offload.choose import offloaded_optimizer
from shardwise.optim.offload.cpu import StreamingOptimizer
from shardwise.optim.offload.nvme import NvmeOptimizer
from shardwise.optim.offload.optimizer import OffloadedOptimizer
from shardwise.parallel.any_module.parallelize import parallelize
from shardwise.parallel.collect import collect, optimizer_states, put_optimizer_states
from shardwise.parallel.engine import Engine
from shardwise.prove.reference import Record, Trial, train_plain
from shardwise.prove.trial import build_trial, train_in_layout, trial_batch, trial_plan
from shardwise.prove.verify import compare
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.plan import Plan
from shardwise.spec.presets import preset
from shardwise.spec.schema import OptimizerConfig

CPU = torch.device("cpu")
SIZES = {"num_layers": 2, "hidden": 20, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6, "ffn": 37, "vocab": 53}
SPEC = preset("tiny").with_overrides(SIZES)
TRIAL = Trial(global_batch=5, micro_batch=1, seq_len=12)
SHORT = replace(TRIAL, num_steps=2)
WAYS: dict[str, dict[str, Any]] = {
    "optimizer": {"offload": "optimizer"},
    "all": {"offload": "all"},
    "nvme": {"offload": "optimizer", "offload_to": "nvme", "offload_buffer": 2**16},
    "all nvme": {"offload": "all", "offload_to": "nvme", "offload_buffer": 2**16},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2 zero=2": {"dp": 2, "zero": 2},
    "dp=2 zero=3": {"dp": 2, "zero": 3},
    "tp=2": {"tp": 2},
    "pp=2": {"pp": 2, "split": (1, 1)},
}
LIMITS = {"fp64": 1e-9, "fp32": 1e-5, "bf16": 1e-5}


def make_plan(way: str, layout: dict[str, Any], directory: Path, trial: Trial = TRIAL) -> Plan:
    return trial_plan(trial, **layout, **WAYS.get(way, {}), offload_dir=str(directory))


def all_layouts(way: str, directory: Path) -> dict[str, Record]:
    """One way in every layout, on one pair of ranks."""
    return {
        layout: train_in_layout(SPEC, make_plan(way, fields, directory), SHORT, dist.get_rank(), CPU)
        for layout, fields in LAYOUTS.items()
    }


@cache
def truth(trial: Trial = TRIAL) -> Record:
    return train_plain(SPEC, trial)


@pytest.mark.parametrize("way", WAYS)
def test_offloading_trains_as_the_plain_run_in_every_layout(way, ranks, tmp_path):
    records = ranks.run(all_layouts, 2, way, tmp_path)[0]
    worst = {layout: max(compare(record, truth(SHORT))[0]) for layout, record in records.items()}
    assert {layout: value for layout, value in worst.items() if not value < 1e-9} == {}
    assert worst.keys() == LAYOUTS.keys()


def one_process(directory: Path) -> dict[str, tuple[Record, Record]]:
    """Every way in every precision, and the plain run."""
    found = {}
    for precision in LIMITS:
        trial = replace(TRIAL, precision=precision)
        plain = train_plain(SPEC, trial)
        for way in WAYS:
            found[f"{way} {precision}"] = (
                train_in_layout(SPEC, make_plan(way, {}, directory, trial), trial, 0, CPU),
                plain,
            )
    return found


def test_one_process_trains_as_the_plain_run_in_every_precision(ranks, tmp_path):
    """In fp32 clipping divides by the inverse factor, one rounding more than the plain run; in fp64 it is the same
    product."""
    (found,) = ranks.run(one_process, 1, tmp_path)
    worst = {name: max(compare(*records)[0][:3]) for name, records in found.items()}
    assert {name: value for name, value in worst.items() if not value < LIMITS[name.split()[-1]]} == {}


# By hand: one process ------------------------------------------------------------------------------------------------


def engine_and_optimizer(way: str, directory: Path, trial: Trial = TRIAL) -> tuple[Engine, torch.optim.Optimizer]:
    plan = make_plan(way, {}, directory, trial)
    engine = build_trial(SPEC, plan, trial, 0, CPU)
    if way != "streaming":
        return engine, engine.optimizer(trial.optimizer)
    # What happens beside a GPU, with copies in CPU memory.
    optimizer = StreamingOptimizer(engine.shards, partial(build_optimizer, trial.optimizer), CPU, torch.float64)
    engine.stream_gradients(optimizer)
    return engine, optimizer


def train_steps(engine: Engine, optimizer: torch.optim.Optimizer, steps: range, trial: Trial = TRIAL) -> list[float]:
    losses = []
    for step in steps:
        batch, num_targets = trial_batch(SPEC, engine.plan, trial, step, 0)
        norm, finish = accumulate(engine, batch, num_targets, Clock(CPU))
        losses.append(float(finish()[0]) / num_targets)
        update(engine, optimizer, norm, lr=trial.optimizer.lr, clip=trial.clip, clock=Clock(CPU))
    return losses


def test_gradients_that_leave_early_train_as_the_plain_run(tmp_path):
    engine, optimizer = engine_and_optimizer("streaming", tmp_path)
    assert train_steps(engine, optimizer, range(1, 4)) == pytest.approx(truth().losses, abs=1e-12)
    for shard in engine.shards:
        torch.testing.assert_close(shard.value, truth().parameters[shard.name], rtol=0, atol=1e-12)


def test_a_gradient_leaves_with_the_last_backward_and_the_norm_still_counts_it(tmp_path):
    engine, _optimizer = engine_and_optimizer("streaming", tmp_path)
    batch, num_targets = trial_batch(SPEC, engine.plan, TRIAL, 1, 0)
    norm, _ = accumulate(engine, batch, num_targets, Clock(CPU))
    assert all(shard.parameter.grad is None for shard in engine.shards)
    assert float(norm) == pytest.approx(truth().norms[0], rel=1e-12)
    for shard in engine.shards:
        torch.testing.assert_close(shard.gradient, truth().gradients[shard.name], rtol=0, atol=1e-12)
    engine.zero_grad()
    assert all(shard.gradient is None for shard in engine.shards)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd", "momentum", "adagrad", "rmsprop"])
@pytest.mark.parametrize("way", ["streaming", "nvme"])
def test_every_optimizer_is_offloaded(way, name, tmp_path):
    trial = replace(TRIAL, optimizer=OptimizerConfig(name=name, lr=1e-3))
    engine, optimizer = engine_and_optimizer(way, tmp_path, trial)
    plain = train_plain(SPEC, trial)
    assert train_steps(engine, optimizer, range(1, 4), trial) == pytest.approx(plain.losses, abs=1e-12)
    for shard in engine.shards:
        torch.testing.assert_close(shard.value, plain.parameters[shard.name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("first", ["none", "streaming", "nvme", "all nvme"])
@pytest.mark.parametrize("second", ["none", "streaming", "nvme", "all nvme"])
def test_any_way_goes_on_from_any_other(first, second, tmp_path):
    """As a checkpoint does it: whole tensors by name, weights and state."""
    engine, optimizer = engine_and_optimizer(first, tmp_path)
    train_steps(engine, optimizer, range(1, 3))
    weights = collect(engine, lambda shard: {shard.name: shard.value})
    states = collect(engine, optimizer_states(optimizer))
    assert {key.split("/")[0] for key in states} == {"exp_avg", "exp_avg_sq", "step"}
    other, other_optimizer = engine_and_optimizer(second, tmp_path)
    for shard in other.shards:
        shard.put(weights[shard.name])
    if isinstance(other_optimizer, StreamingOptimizer):
        other_optimizer.reload_masters()
    put_optimizer_states(other, other_optimizer, states.items())
    assert train_steps(other, other_optimizer, range(3, 4)) == pytest.approx(truth().losses[2:], abs=1e-12)
    for shard in other.shards:
        torch.testing.assert_close(shard.value, truth().parameters[shard.name], rtol=0, atol=1e-12)


def test_a_large_tensor_goes_through_a_small_buffer(tmp_path):
    """One matrix of many groups, one number more than they hold; nothing but the buffer stays in memory."""
    weight, bias = torch.nn.Linear(300, 301, dtype=torch.float32).parameters()
    twin = [torch.nn.Parameter(p.detach().clone()) for p in (weight, bias)]
    build = partial(build_optimizer, OptimizerConfig(lr=1e-2))
    held = [Plain("weight", weight), Plain("bias", bias)]
    optimizer = NvmeOptimizer(held, build, CPU, Disk(tmp_path), buffer_bytes=2**17)
    plain = build(twin)
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        for p, other in zip((weight, bias), twin, strict=True):
            p.grad = torch.randn(p.shape, generator=draw)
            other.grad = p.grad.clone()
        optimizer.step()
        plain.step()
    for p, other in zip((weight, bias), twin, strict=True):
        assert torch.equal(p, other)
        for name, value in plain.state[other].items():
            assert torch.equal(optimizer.state[p][name], value), name
    assert len(optimizer.groups) > 4
    assert sum(buffer.view.nbytes for buffer in optimizer._buffers) <= 2**17
    assert all(not group.optimizer.state for group in optimizer.groups)


class Plain:
    """A parameter that is not split."""

    def __init__(self, name: str, parameter: torch.nn.Parameter):
        from shardwise.optim.offload.optimizer import OffloadedParts

        self.name, self.parameter, self.local, self.elsewhere = name, parameter, parameter, OffloadedParts()

    @property
    def gradient(self) -> torch.Tensor | None:
        return self.parameter.grad


def test_without_state_there_is_nothing_for_a_disk(tmp_path):
    engine, _ = engine_and_optimizer("none", tmp_path)
    build = partial(build_optimizer, OptimizerConfig(name="sgd"))
    optimizer = offloaded_optimizer(engine.shards, build, make_plan("nvme", {}, tmp_path), CPU)
    assert type(optimizer) is OffloadedOptimizer
    assert list(tmp_path.iterdir()) == []


def test_on_a_disk_parameters_and_gradients_take_no_memory_between_uses(tmp_path):
    trial = replace(TRIAL, global_batch=1)  # one micro-batch: nothing accumulates
    engine, optimizer = engine_and_optimizer("all nvme", tmp_path, trial)
    for step in (1, 2):
        batch, num_targets = trial_batch(SPEC, engine.plan, trial, step, 0)
        norm, _ = accumulate(engine, batch, num_targets, Clock(CPU))
        assert all(shard.local.untyped_storage().nbytes() == 0 for shard in engine.shards)
        assert all(shard.parameter.grad is None for shard in engine.shards)
        assert float(norm) == pytest.approx(train_plain(SPEC, trial).norms[step - 1], rel=1e-12)
        update(engine, optimizer, norm, lr=trial.optimizer.lr, clip=trial.clip, clock=Clock(CPU))
    assert all(shard.local.untyped_storage().nbytes() == 0 for shard in engine.shards)


def test_a_small_buffer_is_enough_for_state_three_times_its_size(tmp_path):
    engine, optimizer = engine_and_optimizer("all nvme", tmp_path)
    assert isinstance(optimizer, NvmeOptimizer)
    train_steps(engine, optimizer, range(1, 3))
    slots: list[Any] = [*optimizer._buffers, *optimizer._landings]  # type: ignore[attr-defined]
    in_memory = sum(slot.view.nbytes for slot in slots)
    assert optimizer.file.num_bytes > 3 * in_memory


# Modules that are not ours -------------------------------------------------------------------------------------------


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(12, 12) for _ in range(3))
        self.head = torch.nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def train_any(layout: str, directory: Path) -> tuple[list[float], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    module = Small().double()
    world = dist.get_world_size() if dist.is_initialized() else 1
    plan = replace(
        Plan.from_layout(layout, world=world, precision="fp64"), offload_dir=str(directory), offload_buffer=2**16
    )
    split = parallelize(module, plan, blocks="blocks")
    optimizer = split.optimizer(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True))
    losses = []
    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        rows = torch.randn(8, 12, generator=draw, dtype=torch.float64)
        targets = torch.randint(0, 5, (8,), generator=draw)
        mine = slice(split.rank, None, split.world)
        done = split.gradients([(rows[mine], targets[mine])], cross_entropy, clip=0.1)
        optimizer.step()
        losses.append(done.loss)
    return losses, split.state_dict()


def cross_entropy(model: Any, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    rows, targets = batch
    return torch.nn.functional.cross_entropy(model(rows), targets, reduction="sum"), len(targets)


ANY = ["dp=2 offload=optimizer", "dp=2 zero=3 offload=all", "dp=2 zero=2 offload=nvme"]


def any_layouts(directory: Path) -> dict[str, Any]:
    return {layout: train_any(layout, directory) for layout in ANY}


def test_a_module_that_is_not_ours_trains_as_in_one_process(ranks, tmp_path):
    losses, state = train_any("dp=1", tmp_path)
    for layout, (found, weights) in ranks.run(any_layouts, 2, tmp_path)[0].items():
        assert found == pytest.approx(losses, abs=1e-12), layout
        assert {
            name: value for name, value in weights.items() if not torch.allclose(value, state[name], atol=1e-12)
        } == {}
