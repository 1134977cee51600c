"""Says which ranks of a plan run the same program, so that one of them is rehearsed for all.

What a rank does follows from its stage, its place in the context, the sizes of its slices, the shapes of its
micro-batches, what it exchanges with those that have other experts, and how many rows it has of those parameters whose
gradients travel as they are. Two ranks that agree in all of it make the same calls with the same sizes. Everything else
that ZeRO shards is padded to equal parts, and a class is represented by its first rank, which has the most rows of
each. Invariant: classes come from coordinates alone; tests/rehearse/test_classes.py rehearses every rank of small
worlds and finds each as its class says.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from shardwise.interop.transformers.model import TransformersModel
from shardwise.interop.transformers.spec import TransformersSpec
from shardwise.model.decoder import Decoder
from shardwise.parallel.shards import row_range
from shardwise.parallel.tensor.slices import Placement, placement
from shardwise.rehearse.even_routing import routing_key
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan
from shardwise.spec.recompute import segments
from shardwise.spec.schedules import stage_owners


@dataclass(frozen=True)
class RankClasses:
    """The classes of all ranks of a plan."""

    of_rank: np.ndarray  # (world,): the number of each rank's class
    first: tuple[int, ...]  # the first rank of each class: the one that is rehearsed

    def ranks(self, number: int) -> np.ndarray:
        """Returns the ranks of a class."""
        return np.flatnonzero(self.of_rank == number)


def rank_classes(spec: ModelSpec, plan: Plan) -> RankClasses:
    """Returns the classes of the ranks of a plan."""
    shapes = Shapes(spec, plan)
    numbers: dict[Hashable, int] = {}
    first: list[int] = []
    of_rank = np.empty(plan.world, dtype=np.int64)
    for rank in range(plan.world):
        key = _key(plan, shapes, rank)
        if key not in numbers:
            numbers[key] = len(numbers)
            first.append(rank)
        of_rank[rank] = numbers[key]
    return RankClasses(of_rank, tuple(first))


def families(spec: ModelSpec, plan: Plan, classes: RankClasses) -> list[list[int]]:
    """Returns the classes, by number, in groups of those that differ only in their place in the pipeline: stages with
    as many layers of the same kinds, cut alike, none of them with an end of the model that others lack."""
    found: dict[Hashable, list[int]] = {}
    shapes = Shapes(spec, plan)
    for number, rank in enumerate(classes.first):
        pp, *others = _key(plan, shapes, rank)
        is_alike = plan.pp > 1 and not spec.needs_counts_first  # else a pass comes before the one that is repeated
        key = (tuple(others), _stages(spec, plan, pp)) if is_alike else (tuple(others), pp)
        found.setdefault(key, []).append(number)
    return list(found.values())


def _stages(spec: ModelSpec, plan: Plan, pp: int) -> Hashable:
    """Returns what the stages of a place in the pipeline are made of."""
    owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages)
    found = []
    for stage in (index for index, owner in enumerate(owners) if owner == pp):
        layers = plan.layers_of(stage)
        kinds = tuple(replace(spec.layers[index], index=0) for index in layers)
        again = tuple(tuple(i - layers.start for i in part) for part in segments(plan.recompute, layers))
        beside = tuple(owners[next_to] == pp for next_to in (stage - 1, stage + 1) if 0 <= next_to < len(owners))
        found.append((kinds, again, stage == 0, stage == len(owners) - 1, beside))
    return tuple(found)


def layers_of_rank(plan: Plan, rank: int) -> list[int]:
    """Returns the layers of all stages of a rank, in model order."""
    owners = stage_owners(plan.schedule, plan.pp, plan.virtual_stages)
    at = plan.coordinates(rank).pp
    return [layer for stage, owner in enumerate(owners) if owner == at for layer in plan.layers_of(stage)]


def _key(plan: Plan, shapes: Shapes, rank: int) -> tuple[Any, ...]:
    at = plan.coordinates(rank)
    ep = rank % plan.ep
    state = at.shard * plan.cp + at.cp
    rows = len(plan.rows(at.dp)), routing_key(shapes.spec, plan, rank)
    return at.pp, at.cp, rows, shapes.slices(at.tp, ep), shapes.travelling_rows(at.tp, state)


class Shapes:
    """The parameters of the whole model, and what ranks hold of each by the two cuts: slices and rows."""

    def __init__(self, spec: ModelSpec, plan: Plan):
        self.spec, self.plan = spec, plan
        self.whole = whole_shapes(spec)
        kinds = {_kind(name): (name, shape) for name, shape in self.whole.items()}
        self._examples = list(kinds.values())  # one parameter of each kind: layers repeat
        self.slices = lru_cache(None)(self._slices)
        self.travelling_rows = lru_cache(None)(self._travelling_rows)

    def placed(self, name: str, tp: int, ep: int) -> Placement:
        """Returns what the ranks at a place of a tensor-parallel and of an expert-parallel group hold of a
        parameter."""
        plan = self.plan
        if not self.spec.is_ours:
            return Placement(None, 1, False)
        return placement(self.spec, name, plan.tp, tp, plan.sequence, plan.ep, ep)

    def part(self, name: str, tp: int, ep: int) -> tuple[int, ...]:
        """Returns the shape of that slice."""
        shape, where = list(self.whole[name]), self.placed(name, tp, ep).slice
        if where is not None:
            shape[where.dim] = where.stop - where.start
        return tuple(shape)

    def _slices(self, tp: int, ep: int) -> tuple[tuple[int, ...], ...]:
        return tuple(self.part(name, tp, ep) for name, _ in self._examples)

    def _travelling_rows(self, tp: int, state: int) -> tuple[int, ...]:
        """Returns the rows of this shard of the parameters whose gradients are summed as they are, without padding:
        those of which tensor-parallel ranks have parts, and both ends of a tied one."""
        plan = self.plan
        if not plan.zero:
            return ()
        found = []
        for name, _ in self._examples:
            is_tied = self.spec.tied and name == "embed.weight" and plan.pp > 1
            if ".experts." not in name and (is_tied or self.placed(name, tp, 0).partial):
                start, stop = row_range(self.part(name, tp, 0)[0], plan.state_shards, state)
                found.append(stop - start)
        return tuple(found)


def whole_shapes(spec: ModelSpec) -> Mapping[str, tuple[int, ...]]:
    """Returns the shape of every parameter of the whole model, by its global name."""
    with torch.device("meta"):
        model = TransformersModel(spec) if isinstance(spec, TransformersSpec) else Decoder(spec, "math")
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _kind(name: str) -> str:
    """Returns a parameter's name without its layer's number."""
    return ".".join(part for part in name.split(".") if not part.isdigit())
