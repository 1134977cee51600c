"""Experts without values: every expert is taken to get as many rows as any other, to within one.

Which expert gets which token is a matter of values, and a rehearsal has sizes only. Two things are read from counts
all the same: how many rows each expert computes, and how many travel between the ranks that share experts. Here both
follow from the number of a rank's rows, by one rule (`even_sizes`) for all ranks, so that what one sends is what the
other receives. Invariant: nothing else of a layer is replaced. On CUDA experts go through grouped matmuls, in which an
even routing changes nothing but sizes between ranks.

Shapes: M rows of a rank, E experts, P ranks that share them, L = E/P experts of a rank, R rows that arrive.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from shardwise.model.experts import Experts, even_sizes, moe_layers
from shardwise.parallel.engine import Engine
from shardwise.parallel.expert.dispatch import SpreadExperts
from shardwise.rehearse.program import Line
from shardwise.run.clock import Span
from shardwise.spec.model import ModelSpec
from shardwise.spec.plan import Plan

COUNTING = "count experts"  # the span in which a step's micro-batches go forward first (parallel/engine.py)


class EvenRouting:
    """Answers for the experts of one rank what they would read from counts. `microbatch` is the one under
    way."""

    def __init__(self, engine: Engine, device: str):
        self.engine, self.device, self.microbatch, self.is_counting = engine, device, 0, False
        for model in engine.models:
            model.register_forward_pre_hook(self.count)
            for layer in moe_layers(model):
                _EvenLayer(self, layer.experts)

    def follow(self, span: Span) -> None:
        """Notes which micro-batch an action of the clock is for."""
        self.is_counting = span.name == COUNTING
        self.microbatch = -1 if self.is_counting else span.microbatch or 0

    def count(self, *about: Any) -> None:
        """Notes the next micro-batch, where all of them go forward before the step."""
        self.microbatch += self.is_counting

    @property
    def rows_of_peers(self) -> list[int]:
        """Returns the rows that the micro-batch under way has on each rank that shares experts with this one."""
        mesh, plan = self.engine.mesh, self.engine.plan
        peers = Line(plan.ep, 1).ranks_through(mesh.rank)
        number = 0 if plan.pp > 1 else self.microbatch  # all are alike in a pipeline
        return [microbatch_rows(plan, plan.coordinates(rank).dp)[number] for rank in peers]


class _EvenLayer:
    """The same for one layer."""

    def __init__(self, routing: EvenRouting, experts: Experts):
        self.routing, self.experts = routing, experts
        self.num_rows, self.sizes_L, self.index = 0, list[int](), 0
        experts.register_forward_pre_hook(self.note)
        experts.sizes = self.sizes  # type: ignore[method-assign]
        if routing.device == "cuda":
            experts.groups = lambda x_MD: x_MD.dtype == torch.bfloat16  # type: ignore[method-assign]
        if isinstance(experts, SpreadExperts):
            self.index = experts.group.rank()
            experts.read_rows = self.read_rows  # type: ignore[method-assign]

    def note(self, _: Any, args: tuple[Any, ...]) -> None:
        """Notes how many rows this rank has routed."""
        self.num_rows = args[0].shape[0]

    def read_rows(self, leaving_PL: Tensor, coming_PL: Tensor) -> list[list[int]]:
        """Returns the rows to each rank and those from each."""
        peers = self.routing.rows_of_peers
        rows = tuple(self.num_rows * of_peer // peers[self.index] for of_peer in peers)
        sent, received, self.sizes_L = even_trip(rows, coming_PL.numel(), self.index)
        return [sent, received]

    def sizes(self, x_MD: Tensor, counts_E: Tensor) -> list[int]:
        """Returns the rows of each of this rank's experts."""
        return self.sizes_L or even_sizes(x_MD.shape[0], counts_E.shape[0])


@lru_cache(1024)
def even_trip(rows_P: tuple[int, ...], num_experts: int, index: int) -> tuple[list[int], list[int], list[int]]:
    """Returns what rank `index` of those that share experts sends to each and receives from each, and what each of its
    own experts gets, in rows; `rows_P` are the rows that each rank has routed."""
    num_ranks = len(rows_P)
    own = num_experts // num_ranks
    sizes_PE = {num_rows: even_sizes(num_rows, num_experts) for num_rows in set(rows_P)}
    sent = [sum(sizes_PE[rows_P[index]][rank * own : (rank + 1) * own]) for rank in range(num_ranks)]
    coming_PL = [sizes_PE[num_rows][index * own : (index + 1) * own] for num_rows in rows_P]
    return sent, [sum(coming_L) for coming_L in coming_PL], [sum(column) for column in zip(*coming_PL, strict=True)]


def microbatch_rows(plan: Plan, dp_index: int) -> list[int]:
    """Returns how many rows each micro-batch of a data-parallel index has, as data/loader.py cuts them."""
    num_rows, size = len(plan.rows(dp_index)), plan.micro_batch
    if plan.pp > 1:
        return [size] * plan.num_microbatches
    found = [min(size, num_rows - first) for first in range(0, num_rows, size)]
    return found + [1] * (plan.num_microbatches - len(found))


def routing_key(spec: ModelSpec, plan: Plan, rank: int) -> Hashable:
    """Returns what of a rank's place decides how many rows it exchanges: nothing where all of them are equal."""
    if plan.ep == 1:
        return ()
    per_row = plan.seq_len // (plan.cp * plan.tp) * spec.experts_per_token
    is_even = plan.micro_batch * per_row % spec.num_experts == 0
    if is_even and (plan.pp > 1 or plan.global_batch % (plan.dp * plan.micro_batch) == 0):
        return ()
    peers = Line(plan.ep, 1).ranks_through(rank)
    return rank % plan.ep, tuple(tuple(microbatch_rows(plan, plan.coordinates(peer).dp)) for peer in peers)


def assumed(spec: ModelSpec, plan: Plan) -> str:
    """Returns the assumption in words, with its numbers."""
    tokens = plan.micro_batch * plan.seq_len * plan.ep // (plan.cp * (plan.tp if plan.ep > 1 else 1))
    rows = tokens * spec.experts_per_token / spec.num_experts
    where = f"on {plan.ep} ranks" if plan.ep > 1 else "there"
    return (
        f"every expert gets as many tokens as any other: {rows:,.6g} of the {tokens:,} that a micro-batch has {where}"
    )
