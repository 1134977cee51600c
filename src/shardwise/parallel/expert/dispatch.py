"""Expert parallelism: every rank has some of the experts, whole, and tokens travel to the experts they chose and back.

Owns the exchange of rows and the rewiring of a decoder's mixture-of-experts layers. Routing stays where the tokens
are; shared experts stay where they were. Invariants: every chosen expert gets its row, nothing is dropped or padded;
rows reach an expert ordered by rank and then by token, so results do not depend on timing; ranks without a row take
part in every exchange. GShard, arXiv 2006.16668 section 3; no capacity limit. Read next: model/experts.py, mesh.py
(who stands where).

    split    the experts of every mixture layer, whole ones, over P ranks
    held     L = E/P experts and their optimizer state; all other parameters as without expert parallelism
    sent     per mixture layer and pass: the counts of rows, then two all-to-alls of the rows themselves

Shapes: D model width, E experts, P ranks that share them, L = E/P experts of a rank, M rows before and R rows after
an exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.model.decoder import Decoder
from shardwise.model.experts import Experts, MixtureOfExperts, Routing, arrange, inverse, moe_layers
from shardwise.model.replacement import become
from shardwise.parallel.mesh import Group, Mesh
from shardwise.parallel.tensor.collectives import TensorParallel, all_reduce, share
from shardwise.parallel.traffic import Traffic, Wait, unseen


class SpreadExperts(Experts):
    """This rank's experts, in the place of all of them: it takes rows for any expert and returns their results."""

    def __init__(self, experts: Experts, group: Group, wait: Wait = unseen):
        nn.Module.__init__(self)
        self.activation, self.group, self.wait = experts.activation, group, wait
        for name, weight in (("gate", experts.gate), ("up", experts.up), ("down", experts.down)):
            self.register_parameter(name, None if weight is None else _own_experts(weight, group))

    def forward(self, x_MD: Tensor, counts_E: Tensor) -> Tensor:
        trip = plan_trip(counts_E, self.group, self.wait, self.read_rows)
        x_RD = exchange(x_MD, trip.received, trip.sent, self.group, self.wait)
        if len(trip.counts_L) == 1:
            out_RD = super().forward(x_RD, trip.counts_L)  # all rows are for the one expert, by rank as they arrive
        else:
            out_RD = super().forward(arrange(x_RD, trip.by_expert_R, trip.by_rank_R), trip.counts_L)
            out_RD = arrange(out_RD, trip.by_rank_R, trip.by_expert_R)
        return exchange(out_RD, trip.sent, trip.received, self.group, self.wait)

    def read_rows(self, leaving_PL: Tensor, coming_PL: Tensor) -> list[list[int]]:
        """Returns the rows to each rank and those from each, read from their counts by rank and expert."""
        return rows_by_rank(leaving_PL, coming_PL)


class SplitMixture(MixtureOfExperts):
    """A mixture of experts on a rank that has a part of the tokens of its sequences."""

    sum_counts: Callable[[Tensor], Tensor]  # over the ranks that have the other parts

    def count_whole_sequences(self, counts_BE: Tensor) -> Tensor:
        return self.sum_counts(counts_BE)


def _own_experts(weight: nn.Parameter, group: Group) -> nn.Parameter:
    start, stop = share(weight.shape[0], group.size(), group.rank())
    return nn.Parameter(weight.detach()[start:stop].clone(), requires_grad=weight.requires_grad)


def apply_expert_parallel(model: Decoder, mesh: Mesh, tp: TensorParallel | None, traffic: Traffic) -> None:
    """Keeps only this rank's experts, in place, before tensor parallelism. The model may be a part, or on `meta`."""
    assert mesh.expert is not None
    for layer in moe_layers(model):
        layer.experts = SpreadExperts(layer.experts, mesh.expert.group, traffic.on("ep"))
        become(layer, SplitMixture, sum_counts=sequence_sum(mesh, tp, traffic.on("ep")))
        if tp is not None:
            layer.register_forward_hook(_part_of_losses(tp))


def sequence_sum(mesh: Mesh, tp: TensorParallel | None, wait: Wait = unseen) -> Callable[[Tensor], Tensor]:
    """Returns a function that sums counts (B, E) over the ranks that have the other tokens of the same sequences, as
    far as the pass splits them."""

    def add(counts_BE: Tensor) -> Tensor:
        group = mesh.tokens if tp is not None and tp.active else mesh.cp
        return counts_BE if group is None else all_reduce(counts_BE, group, wait=wait)

    return add


def _part_of_losses(tp: TensorParallel) -> Callable[..., Any]:
    """Returns a forward hook by which every tensor-parallel rank reports its part of the router's losses. In a pass
    that does not split the tokens all of them have computed the whole."""

    def hook(layer: MixtureOfExperts, args: Any, result: tuple[Tensor, Routing | None]) -> Any:
        out_BTD, routing = result
        if routing is not None and not tp.active:
            routing = routing._replace(aux=routing.aux / tp.size, z=routing.z / tp.size)
        return out_BTD, routing

    return hook


# The exchange --------------------------------------------------------------------------------------------------------


class Trip(NamedTuple):
    """How many rows go from each rank to each other, and in which order experts compute them."""

    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    counts_L: Tensor  # rows of each of this rank's experts
    by_expert_R: Tensor  # rows arrive by rank and expert: their order by expert and rank
    by_rank_R: Tensor  # and back


def rows_by_rank(leaving_PL: Tensor, coming_PL: Tensor) -> list[list[int]]:
    """Returns the rows to each rank and those from each, given their counts by rank and expert."""
    return torch.stack((leaving_PL.sum(1), coming_PL.sum(1))).tolist()  # on a GPU: the one wait for values


def plan_trip(
    counts_E: Tensor,
    group: Group,
    wait: Wait = unseen,
    read: Callable[[Tensor, Tensor], list[list[int]]] = rows_by_rank,
) -> Trip:
    """Collective. Exchanges how many rows come for each expert, and returns the trip of this rank's rows."""
    leaving_PL = counts_E.view(group.size(), -1)
    coming_PL = torch.empty_like(leaving_PL)
    with wait("all-to-all", coming_PL.nbytes):
        dist.all_to_all_single(coming_PL, leaving_PL, group=group)
    sent, received = read(leaving_PL, coming_PL)
    experts_PL = torch.arange(coming_PL.shape[1], device=counts_E.device).expand_as(coming_PL)
    experts_R = experts_PL.flatten().repeat_interleave(coming_PL.flatten(), output_size=sum(received))
    by_expert_R = experts_R.argsort(stable=True)
    return Trip(sent, received, coming_PL.sum(0), by_expert_R, inverse(by_expert_R))


def exchange(x: Tensor, received: list[int], sent: list[int], group: Group, wait: Wait = unseen) -> Tensor:
    """Collective. Sends rows to the ranks they are for and returns those that arrive; backward sends the gradients the
    way back. `received` and `sent` count rows by rank."""
    return _Exchange.apply(x, received, sent, group, wait)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, received: list[int], sent: list[int], group: Group, wait: Wait) -> Tensor:
        ctx.trip = (sent, received, group, wait)
        return all_to_all_rows(x, received, sent, group, wait)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return all_to_all_rows(grad, *ctx.trip), None, None, None, None


def all_to_all_rows(x: Tensor, received: list[int], sent: list[int], group: Group, wait: Wait = unseen) -> Tensor:
    """Collective. Returns the rows that come from each rank, in rank order; `sent` and `received` count rows by
    rank."""
    out = x.new_empty(sum(received), *x.shape[1:])
    x = x.contiguous()
    with wait("all-to-all", out.nbytes):
        dist.all_to_all_single(out, x, received, sent, group=group)
    return out
