"""Looks into a training step while it runs: which full tensors are alive at which moment, how many bytes a rank holds.

Runs on ranks. FSDP2 says what it has gathered (`parameter_groups`); hooks on blocks and on the stage's wrapper say
when to look.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardwise.optim.build import build_optimizer
from shardwise.parallel.engine import Engine
from shardwise.parallel.fsdp2 import ShardedParameter, parameter_groups
from shardwise.parallel.pipeline.execute import Stage
from shardwise.prove.reference import Trial
from shardwise.prove.trial import build_trial, trial_batch
from shardwise.run.clock import Clock
from shardwise.run.step import accumulate, update
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Look:
    """One stage at one moment. Full tensors only: gathered parameters and gradients that are not reduced yet."""

    stage: int
    when: str  # "F 3" before layer 3's forward, "B 3" as its backward begins, "after B", "after W", "done"
    last: bool
    gathered: tuple[str, ...]  # first parameter of each gathered group
    gathered_bytes: int
    gradients: tuple[str, ...]  # of single parameters
    gradient_bytes: int
    local_bytes: int  # parameters, gradients and optimizer state as the rank keeps them


@dataclass
class Observation:
    """The second of two steps on one rank."""

    gathers: int = 0
    reductions: int = 0
    traffic_bytes: int = 0
    looks: list[Look] = field(default_factory=list)
    local: dict[str, int] = field(default_factory=dict)  # bytes between the last backward and the optimizer's step
    num_parameters: dict[int, int] = field(default_factory=dict)  # whole stage, on this tensor-parallel rank
    largest_block: int = 0  # parameters
    num_groups: dict[int, int] = field(default_factory=dict)

    def peak(self, *parts: str) -> int:
        """The largest sum of some kinds of bytes at one moment."""
        return max((sum(getattr(look, part) for part in parts) for look in self.looks), default=0)


def observe(spec: ModelSpec, plan: Plan, trial: Trial) -> Observation:
    engine = build_trial(spec, plan, trial, dist.get_rank(), CPU)
    optimizer = build_optimizer(trial.optimizer, engine.locals())
    found, clock = Observation(), Clock(CPU)
    for step in (1, 2):
        if step == 2:
            watch(engine, optimizer, found.looks)
            engine.traffic.gathers = engine.traffic.reductions = engine.traffic.num_bytes = 0
        batch, num_targets = trial_batch(spec, plan, trial, step, engine.mesh.at.dp)
        norm, *_ = accumulate(engine, batch, num_targets, clock)
        found.local = local_bytes(engine, optimizer)
        update(engine, optimizer, norm, lr=1e-3, clip=1.0, clock=clock)
    found.gathers, found.reductions = engine.traffic.gathers, engine.traffic.reductions
    found.traffic_bytes = engine.traffic.num_bytes
    for stage in engine.stages:
        sizes = {name: p.numel() for name, p in stage.model.named_parameters()}  # a DTensor's numel is the full one
        found.num_parameters[stage.index] = sum(sizes.values())
        found.num_groups[stage.index] = len(parameter_groups(stage.model))
        for layer in stage.model.layers:
            block = sum(size for name, size in sizes.items() if name.startswith(f"layers.{layer}."))
            found.largest_block = max(found.largest_block, block)
    return found


def local_bytes(engine: Engine, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    gradients = [gradient for shard in engine.shards if (gradient := shard.gradient) is not None]
    return {
        "parameters": sum(local.nbytes for local in engine.locals()),
        "gradients": sum(gradient.nbytes for gradient in gradients),
        "optimizer": sum(state.nbytes for state in states if state.ndim),
    }


def watch(engine: Engine, optimizer: torch.optim.Optimizer, looks: list[Look]) -> None:
    for stage in engine.stages:
        names = {id(parameter): name for name, parameter in stage.model.named_parameters()}

        def look(when: str, last: bool = False, stage: Stage = stage, names: dict[int, str] = names) -> None:
            kept = sum(local_bytes(engine, optimizer).values())
            looks.append(Look(stage.index, when, last, *_full(stage, names), kept))

        _watch_blocks(stage, look)
        _watch_wrapper(stage, look)


def _watch_blocks(stage: Stage, look: Callable[..., None]) -> None:
    for index, block in stage.model.layers.items():

        def before(module: Any, args: Any, index: str = index) -> None:
            look(f"F {index}")

        def after(module: Any, args: Any, result: Any, index: str = index) -> None:
            result[0].register_hook(lambda gradient: look(f"B {index}"))

        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)


def _watch_wrapper(stage: Stage, look: Callable[..., None]) -> None:
    after_backward, finish = stage.wrapper.after_backward, stage.wrapper.finish

    def then_look(kind: str, *, last: bool) -> None:
        after_backward(kind, last=last)
        look(f"after {kind}", last)

    def finish_and_look() -> None:
        finish()
        look("done", True)

    stage.wrapper.after_backward = then_look  # type: ignore[method-assign]
    stage.wrapper.finish = finish_and_look  # type: ignore[method-assign]


def _full(stage: Stage, names: dict[int, str]) -> tuple[tuple[str, ...], int, tuple[str, ...], int]:
    gathered, gathered_bytes, gradients, gradient_bytes = [], 0, [], 0
    for group in parameter_groups(stage.model):
        storages = [output.untyped_storage() for parameter in group.parameters for output in parameter.gathered]
        on_the_way = group.gather_buffer
        if any(storage.size() for storage in storages) or on_the_way is not None:
            gathered.append(_name(group.parameters[0], stage))
            gathered_bytes += sum(storage.size() for storage in storages)
            if on_the_way is not None:
                gathered_bytes += on_the_way.nbytes
        for parameter in group.parameters:
            found = list(parameter.unreduced_gradients())
            if found:
                gradients.append(_name(parameter, stage))
                gradient_bytes += sum(gradient.nbytes for gradient in found)
    return tuple(gathered), gathered_bytes, tuple(gradients), gradient_bytes


def _name(parameter: ShardedParameter, stage: Stage) -> str:
    module = next(name for name, module in stage.model.named_modules() if module is parameter.module)
    return f"{module}.{parameter.name}"
